"""The report in headless Chromium: it opens without errors, draws every plot, and answers clicks, dark and on a phone.

Skipped where there is no Chromium: Debian's packages are chromium and chromium-driver.
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.explain.html_report import html_report
from tests.explain.page_models import asked, deep

pytest.importorskip("bokeh", reason="the HTML report needs the extra [html]")
webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
exceptions = pytest.importorskip("selenium.common.exceptions")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver: apt-get install chromium chromium-driver"
)

PATIENCE = 60.0  # seconds until every plot is drawn, or a click has its effect, on a machine that does much else
ARGUMENTS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars".split()
WIDE, PHONE = (1200, 900), (390, 844)
# How many colours other than the page's a plot has: of pixels of its canvases, drawn over each other.
COLOURS = """
const found = new Set();
(function look(root) {
  for (const each of root.querySelectorAll("*")) {
    if (each.shadowRoot) look(each.shadowRoot);
    if (each.tagName !== "CANVAS" || !each.width || !each.height) continue;
    const data = new Uint32Array(each.getContext("2d").getImageData(0, 0, each.width, each.height).data.buffer);
    for (let place = 0; place < data.length; place += 7) if (data[place] >>> 24 > 200) found.add(data[place]);
  }
})(arguments[0]);
return found.size;
"""
HIDDEN = "const b = arguments[0].getBoundingClientRect(); return b.bottom < 0 || b.top > innerHeight || !b.height;"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "report.html"
    path.write_text(asked()[1])
    return path


def opened(driver: Any, path: Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> float:
    """Open a page as it is seen on a screen of this size; returns the seconds until all of it was drawn."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    coloured(driver, scheme)
    driver.get("about:blank")
    driver.get_log("browser")
    begun = time.perf_counter()
    driver.get(path.as_uri())
    until(driver, lambda: driver.execute_script("return document.body.dataset.drawn"))
    return time.perf_counter() - begun


def until(driver: Any, reached: Callable[[], object]) -> None:
    """Wait for what the page does by and by; a page that draws may answer the driver too late to be asked once only."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < PATIENCE:
        with suppress(exceptions.TimeoutException):
            if reached():
                return
        time.sleep(0.05)
    raise AssertionError(driver.get_log("browser"))


def clicked(driver: Any, element: Any) -> bool:
    """Scroll to an element and click on it; not if the page has moved it meanwhile."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    try:
        element.click()
    except exceptions.ElementClickInterceptedException:
        return False
    return True


def errors(driver: Any) -> list[str]:
    """What the console says since it was last asked, but for Bokeh's version."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] != "INFO"]


def coloured(driver: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    until(driver, lambda: driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]}) is not None)


def drawn(driver: Any) -> dict[str, int]:
    """Every plot of the page with the number of its colours."""
    return {
        plot.get_attribute("id"): driver.execute_script(COLOURS, plot) for plot in driver.find_elements("css selector", ".plot")
    }


def test_it_opens_without_errors_and_draws_every_plot(driver: Any, page: Path) -> None:
    opened(driver, page)
    assert errors(driver) == []
    found = drawn(driver)
    assert len(found) == 8
    assert all(colours > 3 for colours in found.values()), found
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize(
    "question, says",
    [
        ("Why is it slow?", "compute, forward"),
        ("What fills the memory?", "the peak is in"),
        ("What if I had more devices?", "ms per step"),
        ("What if I had less memory?", "slower by"),
        ("Why not FSDP?", "With fsdp instead of this plan"),
    ],
)
def test_a_question_is_answered_by_one_click(driver: Any, page: Path, question: str, says: str) -> None:
    opened(driver, page)
    link = driver.find_element("xpath", f"//nav//a[b[text()='{question}']]")
    link.click()
    place = driver.find_element("id", link.get_attribute("hash")[1:])
    until(driver, lambda: not driver.execute_script(HIDDEN, place))
    assert says in place.text


def test_an_operator_says_why_by_click_and_by_key(driver: Any, page: Path) -> None:
    opened(driver, page)
    summary = driver.find_element("css selector", "details.item > summary")
    why = summary.find_element("xpath", "../div")
    assert not why.is_displayed()
    summary.send_keys("\ue007")  # Enter
    assert why.is_displayed()
    assert "chosen" in why.text
    until(driver, lambda: clicked(driver, summary))
    assert not why.is_displayed()
    fold = driver.find_element("id", "fold")
    driver.execute_script("arguments[0].click()", fold)
    assert not any(each.is_displayed() for each in driver.find_elements("css selector", "details.module ul"))


def test_it_is_dark_where_the_system_is(driver: Any, page: Path) -> None:
    """And becomes it when that changes: letters of plots are drawn anew."""
    opened(driver, page)
    plot = driver.find_element("id", "plot-memory")
    for scheme, colour, seen in (("light", "rgb(255, 255, 255)", range(201, 256)), ("dark", "rgb(20, 23, 27)", range(80))):
        coloured(driver, scheme)
        until(driver, lambda seen=seen: int(brightness(plot)) in seen)  # type: ignore[misc]
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == colour
    assert errors(driver) == []


def brightness(plot: Any) -> float:
    """The brightness that most of a picture's left edge has, with the letters of an axis: 0 black, 255 white."""
    from PIL import Image

    picture = Image.open(io.BytesIO(plot.screenshot_as_png)).convert("L")
    return float(np.median(np.asarray(picture.crop((0, 0, 60, picture.height)))))


def test_it_fits_a_phone(driver: Any, page: Path) -> None:
    opened(driver, page, PHONE, "dark")
    assert driver.execute_script("return document.documentElement.scrollWidth") == PHONE[0]
    for plot in driver.find_elements("css selector", ".plot"):
        assert 250 < plot.rect["width"] <= PHONE[0]
    heights = "return [...document.querySelectorAll('tr:has(td:nth-child(4))')].map(row => row.getBoundingClientRect().height)"
    assert 0 < max(driver.execute_script(heights)) < 120, "a table that scrolls has no words that are a letter wide"
    assert all(colours > 3 for colours in drawn(driver).values())
    assert errors(driver) == []


def test_a_saved_plan_opens_without_errors(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved.html"
    path.write_text(html_report(asked()[0].plan))
    opened(driver, path)
    assert errors(driver) == []
    assert driver.find_element("tag name", "h1").text


def test_a_model_of_96_layers_is_small_and_opens_soon(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep.html"
    path.write_text(deep())
    assert path.stat().st_size < 3e6
    opened(driver, path)
    script = "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    processor = {one["name"]: one["value"] for one in metrics(driver)}
    assert driver.execute_script(script) > 0
    assert processor["TaskDuration"] < 2.0  # seconds of the main thread: the clock counts what else the machine does
    assert errors(driver) == []


def metrics(driver: Any) -> list[dict[str, Any]]:
    """What Chromium counts of the page that is open, since it was opened."""
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    found: list[dict[str, Any]] = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return found
