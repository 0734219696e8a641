"""A page in a real browser, as tests look at it and touch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.waiting import PATIENCE_S


class Browser:
    """A page in chromium."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def show(self, url: str, *, width: int = 1280) -> None:
        """Show a page in a window of a width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        # The same address with the same fragment would not be loaded anew.
        self._driver.get("about:blank")
        self._driver.get(url)

    def prefer(self, scheme: str) -> None:
        """Let the system have a colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": features}
        )

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._driver.execute_script(f"return {script}")

    def find(self, css: str, containing: str = "") -> Any:
        """The first element that is shown, once there is one."""

        def shown(_: object) -> Any:
            found = self._driver.find_elements("css selector", css)
            there = [
                one for one in found if containing in one.get_attribute("textContent")
            ]
            return there[0] if there else None

        return self.until(shown, f"{css} with {containing!r}")

    def until(self, true: Callable[[Any], Any], what: str) -> Any:
        """Wait for what a function finds."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self._driver, PATIENCE_S).until(true, what)

    def shows(self, script: str, value: object) -> bool:
        """Wait until a script returns a value."""
        return bool(
            self.until(lambda _: self.run(script) == value, f"{script}: {value}")
        )

    def errors(self) -> list[str]:
        """What the browser has complained of since the last call."""
        log = self._driver.get_log("browser")
        return [one["message"] for one in log if one["level"] == "SEVERE"]

    def picture(self) -> bytes:
        """The page as PNG."""
        return bytes(self._driver.get_screenshot_as_png())

    @property
    def url(self) -> str:
        """The address that is shown."""
        return str(self._driver.current_url)
