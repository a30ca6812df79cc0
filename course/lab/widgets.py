"""Pictures with sliders: a widget is a pure function from numbers to a figure, and a slider for each number."""

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure


def png(figure: Figure) -> bytes:
    """A figure as an image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    return buffer.getvalue()


def explore(draw: Callable[..., Figure], alt: str, **sliders: Sequence[Any]) -> Any:
    """Show `draw(**values)` with a slider for each keyword over its values; returns the widget.

    Each slider starts at its first value, so that moving it is an experiment. `alt` says in words what is drawn, for who
    cannot see it; it stands below the picture, so it must not say what moving the slider shows. Where widgets do not
    work, such as on a page that only shows the notebook, the first picture stands in.
    """
    import ipywidgets as widgets
    from IPython.display import display

    handles = {name: widgets.SelectionSlider(options=list(values), value=values[0], description=name,
                                             continuous_update=False, style={"description_width": "initial"})
               for name, values in sliders.items()}
    image = widgets.Image(format="png")

    def redraw(_: Any = None) -> None:
        image.value = png(draw(**{name: handle.value for name, handle in handles.items()}))

    for handle in handles.values():
        handle.observe(redraw, "value")
    redraw()
    box = widgets.VBox([*handles.values(), image, widgets.HTML(f"<i>{escape(alt)}</i>")])
    bundle = {**box._repr_mimebundle_(), "image/png": base64.b64encode(image.value).decode(), "text/plain": alt}
    display(bundle, raw=True)
    return box
