"""Time and error of the smallest singular value by Lanczos and by SVD: `python benchmarks/sigma_min.py`."""

import statistics
import sys
import time

import torch

from support_tokens.margins.linalg import sigma_min_with_bound


def seconds(function, repeats: int = 3) -> float:
    """Median time of a call, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(side: int = 576, count: int = 8) -> None:
    """Prints one line a dtype and kind of matrix: milliseconds a matrix, largest relative error and bound."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for scale in (0.3, 0.9):
            noise = torch.randn(count, side, side, generator=generator, dtype=torch.float64) / side**0.5
            matrix = (torch.eye(side, dtype=torch.float64) + scale * noise).to(dtype)
            value, bound = sigma_min_with_bound(matrix)
            true = torch.linalg.svdvals(matrix.double())[:, -1]
            print(
                f"{dtype} noise {scale}: Lanczos {1e3 * seconds(lambda: sigma_min_with_bound(matrix)) / count:.1f} ms, "  # noqa: B023
                f"LU {1e3 * seconds(lambda: torch.linalg.lu_factor(matrix)) / count:.1f} ms, "  # noqa: B023
                f"SVD {1e3 * seconds(lambda: torch.linalg.svdvals(matrix), 1) / count:.1f} ms; relative error "  # noqa: B023
                f"{float(((value - true) / true).abs().max()):.1e}, bound {float((bound / true).max()):.1e}"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
