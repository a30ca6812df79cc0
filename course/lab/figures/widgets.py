"""Figures with sliders: a widget is a pure function from values to a figure, with a slider per argument."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from course.utils.errors import CourseError


def png(figure: Figure) -> bytes:
    """Render a figure to PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    return buffer.getvalue()


def explore(draw: Callable[..., Figure], alt: str, start: Mapping[str, Any] | None = None, **sliders: Sequence[Any]) -> Any:
    """Show `draw(**values)` with a slider for each keyword over its values; returns the widget.

    A slider starts at its value in `start`, or at its first value. `alt` is the alt text; it also appears below the figure, so
    it must not reveal what moving the sliders shows. If `draw` raises `CourseError` because values do not fit together, its
    sentence replaces the figure. Pages that cannot run widgets show the first figure.
    """
    import ipywidgets as widgets
    from IPython.display import display

    handles = {name: widgets.SelectionSlider(options=list(values), value=(start or {}).get(name, values[0]), description=name,
                                             continuous_update=False, style={"description_width": "initial"})
               for name, values in sliders.items()}
    image, sentence = widgets.Image(format="png"), widgets.HTML()

    def redraw(_: Any = None) -> None:
        try:
            image.value = png(draw(**{name: handle.value for name, handle in handles.items()}))
        except CourseError as error:
            sentence.value, image.layout.display = f"<b>{escape(str(error))}</b>", "none"
        else:
            sentence.value, image.layout.display = "", ""

    for handle in handles.values():
        handle.observe(redraw, "value")
    redraw()
    box = widgets.VBox([*columns(list(handles.values())), sentence, image, widgets.HTML(f"<i>{escape(alt)}</i>")])
    bundle = {**box._repr_mimebundle_(), "image/png": base64.b64encode(image.value).decode(), "text/plain": alt}
    display(bundle, raw=True, metadata={"image/png": {"alt": alt}})
    return box


def columns(handles: Sequence[Any], most: int = 6) -> list[Any]:
    """Arrange sliders in one column, or in two if there are more than `most`."""
    import ipywidgets as widgets

    if len(handles) <= most:
        return list(handles)
    half = -(-len(handles) // 2)
    return [widgets.HBox([widgets.VBox(handles[:half]), widgets.VBox(handles[half:])])]
