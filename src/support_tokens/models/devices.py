"""The device that a user names, checked before anything is put on it."""

__all__ = ["checked_device"]

import torch

from support_tokens.errors import ArgumentError


def checked_device(device: str) -> torch.device:
    """The device of a name, once a tensor could be put there.

    Args:
        device: As torch names it.

    Raises:
        ArgumentError: Torch does not know the name, or there is no such device on this machine.

    Example:
        >>> checked_device("cpu")
        device(type='cpu')
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device must be one that torch knows, received {device!r}; try cpu or cuda.") from error
    try:
        torch.empty(1, device=place)
    except (
        AssertionError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # each backend says in its own way that it lacks
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:200]
        raise ArgumentError(
            f"device must be one of this machine, and {device!r} cannot be used here ({reason}); pass cpu, or install "
            "the torch of that device."
        ) from error
    return place
