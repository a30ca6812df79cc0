"""Figures with sliders: a widget is a pure function from values to a figure, with a control per argument."""

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
    """Show `draw(**values)` with a control for each keyword over its values; returns the widget.

    Two values get buttons, more numbers a slider, more words a list. A control starts at its value in `start`, or at its first
    value. `alt` is the alt text; it also appears below the figure, so
    it must not reveal what moving the sliders shows. If `draw` raises `CourseError` because values do not fit together, its
    sentence replaces the figure. Pages that cannot run widgets show the first figure.
    """
    import ipywidgets as widgets
    from IPython.display import display

    handles = {name: control(name, list(values), (start or {}).get(name, values[0])) for name, values in sliders.items()}
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


def control(name: str, values: list[Any], start: Any) -> Any:
    """Buttons for two values, a slider for more numbers, a list for more words."""
    import ipywidgets as widgets

    same: dict[str, Any] = {"options": values, "value": start, "description": name}
    if len(values) == 2:
        return widgets.ToggleButtons(**same, style={"description_width": "initial", "button_width": "auto"})
    if not all(isinstance(value, str) for value in values):
        return widgets.SelectionSlider(**same, continuous_update=False, style={"description_width": "initial"})
    return widgets.Dropdown(**same, style={"description_width": "initial"}, layout={"width": "auto", "max_width": "300px"})


def columns(handles: Sequence[Any], most: int = 6) -> list[Any]:
    """Arrange controls in one column, or in two if there are more than `most` and the cell is wide enough."""
    import ipywidgets as widgets

    if len(handles) <= most:
        return list(handles)
    half = -(-len(handles) // 2)
    halves = [widgets.VBox(part, layout={"min_width": "310px"}) for part in (handles[:half], handles[half:])]
    return [widgets.HBox(halves, layout={"flex_flow": "row wrap"})]
