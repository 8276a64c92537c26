"""`python -m support_tokens` is the command `support-tokens`."""

__all__: list[str] = []

from support_tokens.cli import main

if __name__ == "__main__":
    main()
