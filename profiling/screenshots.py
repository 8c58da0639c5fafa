"""Takes pictures of the page's lanes for the README: on a desktop and on a phone, light and dark."""

import argparse
import base64
from pathlib import Path

import browser
from PIL import Image

SCREENS = {
    "light": ("light", 1100, 768, 1),
    "dark": ("dark", 1100, 768, 1),
    "phone": ("light", 390, 780, 1.5),
    "phone-dark": ("dark", 390, 780, 1.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("build/profile/index.html"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/profile"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with browser.opened() as driver:
        for name, screen in SCREENS.items():
            browser.show(driver, given.page, *screen)
            path = given.out / f"{name}.png"
            path.write_bytes(base64.b64decode(driver.get_screenshot_as_base64()))
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path)


if __name__ == "__main__":
    main()
