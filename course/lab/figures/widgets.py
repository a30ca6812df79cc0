"""Pictures with sliders: a widget is a pure function from numbers to a figure, and a slider for each number."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from course.utils.errors import CourseError


def png(figure: Figure) -> bytes:
    """A figure as an image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight")
    return buffer.getvalue()


def explore(draw: Callable[..., Figure], alt: str, start: Mapping[str, Any] | None = None, **sliders: Sequence[Any]) -> Any:
    """Show `draw(**values)` with a slider for each keyword over its values; returns the widget.

    A slider starts at its value in `start`, or at its first one, so that moving it is an experiment. `alt` says in words what is
    drawn, for who cannot see it; it stands below the picture, so it must not say what moving the slider shows. Values that do not
    go together, for which `draw` raises a `CourseError`, show its sentence in the place of the picture. Where widgets do not
    work, such as on a page that only shows the notebook, the first picture stands in.
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
    """Sliders below one another, or in two columns if there are many."""
    import ipywidgets as widgets

    if len(handles) <= most:
        return list(handles)
    half = -(-len(handles) // 2)
    return [widgets.HBox([widgets.VBox(handles[:half]), widgets.VBox(handles[half:])])]
