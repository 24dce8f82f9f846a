"""The progress bar of a run in a notebook: HTML that the cell's output replaces. It needs no widgets."""

from __future__ import annotations

import html
import sys
from typing import Any

from springtide.errors import printable


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    """A bar with a line of text, shown in the output of the cell that runs."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown: Any = None

    def show(self, done: int, figures: str) -> None:
        """Draw the bar, or draw it anew."""
        from IPython.display import HTML, display

        page = HTML(bar_html(done, self._total, figures))
        if self._shown is None:
            self._shown = display(page, display_id=True)
        else:
            self._shown.update(page)


def bar_html(done: int, total: int, figures: str) -> str:
    """Return the bar as HTML, in which ``figures`` is text.

    >>> bar_html(3, 60, "loss 5.1")
    '<progress value="3" max="60"></progress> step 3/60&ensp;loss 5.1'
    """
    bar = f'<progress value="{done}" max="{max(1, total)}"></progress> step {done}/{total}'
    return bar + f"&ensp;{printable(html.escape(figures))}"
