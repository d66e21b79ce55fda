"""r7convert: an offline converter and repacker for mixture-of-experts checkpoints in EXL3: R7, rank-sliced and plain."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "open_slabs"]

if TYPE_CHECKING:
    from r7convert.slabs import open_slabs


def __getattr__(name: str) -> Any:
    """`open_slabs` on first use, so that importing the package stays free."""
    if name == "open_slabs":
        from r7convert.slabs import open_slabs

        return open_slabs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
