"""A real browser, offline, for the tests of pages; skipped where none is installed."""

import shutil
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000  # milliseconds: a loaded machine is slow, not wrong


@contextmanager
def running_browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=FLAGS, timeout=PATIENCE)
        yield running
        running.close()


@contextmanager
def visitor(browser):
    """Opens pages offline; any error, or request to the network, fails at the end."""
    contexts, complaints = [], []

    def opened(path, width=1400, scheme="light", script=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            offline=True,
            reduced_motion="reduce",
            java_script_enabled=script,
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "blob:")) or complaints.append(request.url)
            ),
        )
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri())
        if script:
            page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
