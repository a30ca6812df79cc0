"""What a learner does in JupyterLab, in the words of a browser."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

LONGEST = 240                                        # seconds that anything may take, on a machine that has other work
NULL, ENTER, SHIFT, CONTROL, END, HOME = "\ue000\ue007\ue008\ue009\ue010\ue011"        # NULL lets go of all
LEFT, RIGHT = "\ue012\ue014"
SEEN = """
const shown = [...arguments[0].querySelectorAll('.widget-html-content b, img.widget-image')].filter(e => e.offsetParent);
return shown.map(e => {
    if (e.tagName == 'B') return e.textContent;
    if (!e.complete || !e.naturalWidth) return '';
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [e.naturalWidth, e.naturalHeight];
    canvas.getContext('2d').drawImage(e, 0, 0);
    return canvas.toDataURL();
}).join('');
"""


# What does not fit, of all that is shown below the top: scroll bars, and text that ends before it is all said.
CUT = """
const size = e => e.clientWidth + ' of ' + e.scrollWidth + ' pixels, ';
const name = e => size(e) + e.tagName + '.' + [...e.classList].join('.') + ': ' + e.textContent.trim().slice(0, 60);
return [...document.querySelectorAll('.jp-Notebook .jp-Cell *')].filter(e => {
    const style = getComputedStyle(e), wider = e.scrollWidth - e.clientWidth;
    if (!e.offsetParent || !e.clientWidth || wider <= 1 || style.overflowX == 'visible') return false;
    return style.overflowX != 'hidden' || style.textOverflow == 'ellipsis' || e.closest('.jupyter-widgets');
}).map(name);
"""


class Lab:
    """JupyterLab in a browser (`selenium.webdriver.Chrome`), at an address that asks for a token."""

    def __init__(self, browser: Any, address: str, token: str, failed: Path) -> None:
        from selenium.common import exceptions
        from selenium.webdriver.support.wait import WebDriverWait

        self.browser, self.address, self.token, self.failed = browser, address, token, failed
        passing = (exceptions.ElementClickInterceptedException, exceptions.ElementNotInteractableException,      # covered, hidden
                   exceptions.StaleElementReferenceException, StopIteration, IndexError)           # drawn again, not there yet
        self.waiting = WebDriverWait(browser, LONGEST, 0.1, passing)

    def wait(self, condition: Callable[[], Any], message: str) -> Any:
        """What the condition gives once it holds; elements may come, go and be covered meanwhile."""
        from selenium.common.exceptions import TimeoutException

        try:
            return self.waiting.until(lambda _: condition())
        except TimeoutException:
            self.picture(self.failed)
            raise AssertionError(f"{message}: see {self.failed}") from None

    def all(self, css: str, inside: Any = None) -> list[Any]:
        return (inside or self.browser).find_elements("css selector", css)

    def one(self, css: str, inside: Any = None) -> Any:
        """The first element of this selector, once it is shown."""
        return self.wait(lambda: next(found for found in self.all(css, inside) if found.is_displayed()), f"no {css}")

    def click(self, css: str, text: str = "") -> None:
        """Click on the first element of this selector with this text."""
        self.wait(lambda: next(found for found in self.all(css) if text in found.text).click() or True, f"no {css} {text}")

    def open(self, notebook: str) -> None:
        """Open a notebook (its path in the course's folder), and wait for its kernel."""
        self.browser.get(f"{self.address}/lab/tree/{notebook}?token={self.token}&reset")
        self.one(".jp-Notebook .jp-CodeCell .cm-content")
        self.wait(lambda: "| Idle" in self.one("#jp-main-statusbar").text, "no kernel")   # a restart before would be lost

    def resize(self, width: int) -> None:
        """Make the window this wide; JupyterLab looks at it when a notebook is opened."""
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                     {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False})

    def hide_files(self) -> None:
        """Close the file browser, as in a narrow window."""
        if self.all(".jp-DirListing-content") and self.all(".jp-DirListing-content")[0].is_displayed():
            self.browser.execute_async_script("window.jupyterapp.commands.execute('application:toggle-left-area')"
                                              ".then(arguments[0])")
        self.wait(lambda: not self.all(".jp-DirListing-content")[0].is_displayed(), "the files are still there")

    def theme(self, name: str) -> None:
        """Show the page in the theme "Light" or "Dark"."""
        self.browser.execute_async_script("window.jupyterapp.commands.execute('apputils:change-theme', {theme: arguments[0]})"
                                          ".then(arguments[1])", f"JupyterLab {name}")
        light = "true" if name == "Light" else "false"
        self.wait(lambda: self.browser.execute_script("return document.body.dataset.jpThemeLight") == light, f"not {name}")

    def cut(self) -> list[str]:
        """What does not fit its cell: elements with a scroll bar from left to right, or whose text is cut."""
        return self.browser.execute_script(CUT)

    def cell(self, text: str) -> Any:
        """The first code cell in whose source this text stands."""
        return self.wait(lambda: next(cell for cell in self.all(".jp-CodeCell") if text in self.source(cell)), f"no {text}")

    def source(self, cell: Any) -> str:
        return self.browser.execute_script("return arguments[0].querySelector('.cm-content').innerText", cell)

    def prompts(self) -> list[str]:
        """What stands beside the cells: [ ]: not yet, [*]: it runs or waits, [7]: it has run."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.textContent)")

    def restart_and_run_all(self) -> None:
        """Choose it from the menu, and wait until all cells have run or one has stopped them."""
        self.click(".lm-MenuBar-itemLabel", "Kernel")
        self.click(".lm-Menu-item[data-command='runmenu:restart-and-run-all']:not(.lm-mod-disabled)")
        self.browser.execute_script("arguments[0].click()", self.one(".jp-Dialog .jp-mod-accept"))    # it may move
        self.wait(lambda: any("*" in prompt for prompt in self.prompts()), "nothing runs")
        self.wait(lambda: not any("*" in prompt for prompt in self.prompts()), "cells still run")

    def press(self, cell: Any, *keys: str) -> None:
        """Press keys in a cell, which gets the focus."""
        self.all(".cm-content", cell)[0].send_keys(*keys)

    def run(self, cell: Any, expected: str = "") -> str:
        """Run a cell, and wait until it has run, and this text stands below it; all that stands there then."""
        before = self.prompt(cell)
        self.press(cell, CONTROL, ENTER, NULL)
        self.wait(lambda: self.prompt(cell) not in (before, "[*]:"), f"it does not end: {self.source(cell)}")
        self.wait(lambda: expected in self.shown(cell), f"no {expected!r} below {self.source(cell)}")
        return self.shown(cell)

    def prompt(self, cell: Any) -> str:
        return self.all(".jp-InputPrompt", cell)[0].text

    def shown(self, cell: Any) -> str:
        """The text below a cell."""
        return "\n".join(output.text for output in self.all(".jp-OutputArea-output", cell))

    def last_line(self, cell: Any, line: str) -> None:
        """Write a line in the place of a cell's last one."""
        self.press(cell, CONTROL, END, NULL, SHIFT, HOME, NULL, line)
        self.wait(lambda: self.source(cell).rstrip().endswith(line), f"{line!r} is not what stands in {self.source(cell)}")

    def seen(self, cell: Any) -> str:
        """The picture of a cell's widget, pixel by pixel, or the sentence in its place; empty before there is one."""
        return self.browser.execute_script(SEEN, cell)

    def controls(self, cell: Any) -> dict[str, Any]:
        """The sliders, lists and buttons of a cell's widget by their names."""
        found = self.all(".widget-slider, .widget-dropdown, .widget-toggle-buttons", cell)
        return {self.all("label", control)[0].text: control for control in found}

    def value(self, control: Any) -> str:
        """The value that a control shows."""
        return self.browser.execute_script("""
            const list = arguments[0].querySelector('select');
            return list ? list.selectedOptions[0].text : arguments[0].querySelector('.widget-readout, .mod-active').textContent;
        """, control).strip()

    def is_last(self, control: Any) -> bool:
        return self.browser.execute_script("""
            const list = arguments[0].querySelector('select'), handle = arguments[0].querySelector('.noUi-handle');
            if (handle) return handle.ariaValueNow == handle.ariaValueMax;
            return list ? list.selectedIndex == list.length - 1 : !arguments[0].querySelector('.mod-active').nextElementSibling;
        """, control)

    def move(self, cell: Any, control: Any, step: int) -> str:
        """Go to the next value of a control (1) or back (-1); wait for it and for another picture, and return the one before."""
        from selenium.webdriver.support.select import Select

        value, before = self.value(control), self.wait(lambda: self.seen(cell), "no picture")
        if handles := self.all(".noUi-handle", control):
            handles[0].send_keys(RIGHT if step > 0 else LEFT)
        elif lists := self.all("select", control):
            choice = Select(lists[0])
            choice.select_by_index(choice.options.index(choice.first_selected_option) + step)
        else:
            next(button for button in self.all("button", control) if button.text != value).click()
        self.wait(lambda: self.value(control) != value, f"the control at {value} does not move")
        self.wait(lambda: self.seen(cell) not in ("", before), f"nothing changes after {value} in {self.source(cell)}")
        return before

    def picture(self, path: Path, top: Any = None) -> None:
        """Keep what the window shows, from this element down, in 256 colors, which is enough for text and curves."""
        if top:
            self.browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", top)
        with Image.open(io.BytesIO(self.browser.get_screenshot_as_png())) as shot:
            shot.convert("RGB").quantize(256).save(path, optimize=True)
