"""A headless Chromium to render the page; needs Chromium (or Chrome), its driver, and selenium."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def missing() -> str | None:
    """The part of a browser that this machine lacks, or None."""
    if _chromium() is None:
        return "no chromium on the PATH"
    return "no chromedriver on the PATH" if shutil.which("chromedriver") is None else None


@contextmanager
def opened() -> Iterator[webdriver.Chrome]:
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _chromium()
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def show(driver: webdriver.Chrome, page: Path, scheme: str, width: int, height: int, scale: float = 1) -> None:
    """Opens the page in a colour scheme, "light" or "dark", on a screen of that many CSS pixels."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.get(page.resolve().as_uri())


def requested(driver: webdriver.Chrome) -> list[str]:
    """All addresses requested since the last call, except inline data and the browser's own pages."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [
        request["request"]["url"]
        for request in asked
        if not request["documentURL"].startswith("chrome") and not request["request"]["url"].startswith("data:")
    ]
