"""What a policy may write as an address."""

from __future__ import annotations

import pytest

from handlers.web.inside.addresses import whole

HERE, ROOT = "http://shop.test/lamps/desk.html?page=2", "http://shop.test/"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://shop.test/a", "http://shop.test/a"), ("HTTPS://x.test", "HTTPS://x.test"),
        ("/cart", "http://shop.test/cart"), ("floor.html", "http://shop.test/lamps/floor.html"),
        ("?page=3", "http://shop.test/lamps/desk.html?page=3"), ("../index.html", "http://shop.test/index.html"),
        ("shop.test/cart", "http://shop.test/cart"), ("shop.test", "http://shop.test"),
        ("127.0.0.1:80/x", "http://127.0.0.1:80/x"), ("cart", "http://shop.test/lamps/cart"),
    ],
)  # fmt: skip
def test_short_addresses_are_made_whole(url: str, address: str) -> None:
    assert whole(url, HERE, ROOT) == address


def test_a_path_goes_on_from_the_site_where_there_is_no_page() -> None:
    for here in ("about:blank", "chrome-error://chromewebdata/"):
        assert whole("cart.html", here, ROOT) == "http://shop.test/cart.html"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "an empty address"), ("file:///etc/passwd", "only http://"), ("FILE:/etc/passwd", "only http://"),
        ("view-source:http://shop.test/", "only http://"), ("javascript:alert(1)", "only http://"),
        ("data:text/html,x", "only http://"), ("chrome://version", "only http://"), ("http:x", "only http://"),
        ("/" + "a" * 5000, "an address of 5001 characters"),
        ("http://[", "is no address"), ("http:///x", "is no address"),
    ],
)  # fmt: skip
def test_what_is_no_page_of_the_web_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        whole(url, HERE, ROOT)
