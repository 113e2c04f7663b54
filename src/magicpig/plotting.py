"""What all plots share: matplotlib, which is an extra, and figures as bytes."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def require() -> None:
    """Raises where matplotlib is missing: to be called before the work, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RuntimeError(
            "plots need matplotlib, which is not installed: pip install 'magicpig[eval]'"
        ) from None


def png(figure: Figure, **settings: Any) -> bytes:
    """The same bytes for the same figure. settings: as savefig takes them."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None}, **settings)
    return buffer.getvalue()


def data_uri(picture: bytes) -> str:
    """A PNG as HTML holds it."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
