"""Pictures on the page: attached, sent, kept, read aloud, refused in words."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Page, expect

from tests.page.conftest import Opened, file
from tests.page.scripted import Scripted, end, says
from tests.page.test_access import axe
from tests.page.test_answers import ask
from tests.page.test_kept import say
from tests.server.conftest import until
from treadle.media.limits import MediaLimits

PNG = "image/png"
JPEG_OFF = 12  # levels of 255 that a channel of smooth areas may differ after JPEG of quality 0.9


@pytest.fixture
def sighted(script: Scripted) -> Scripted:
    """A server whose model reads pictures."""
    script.props["modalities"] = {"vision": True, "audio": False}
    return script


def painted(size: tuple[int, int], mode: str = "RGB", form: str = "PNG", **saved: Any) -> bytes:
    """A picture's file: red above, blue below, in the lower half transparent if ``mode`` can."""
    width, height = size
    made = Image.new("RGBA", size, (255, 0, 0, 255))
    made.paste((0, 0, 255, 100), (0, height // 2, width, height))
    out = io.BytesIO()
    made.convert(mode).save(out, form, **saved)
    return out.getvalue()


def picture(name: str = "cat.png", content: bytes | None = None, kind: str = PNG) -> FilePayload:
    """A picture that somebody chooses."""
    raw = painted((40, 20)) if content is None else content
    return {"name": name, "mimeType": kind, "buffer": raw}


def pick(page: Page, *chosen: FilePayload) -> None:
    page.set_input_files("#picture-file", list(chosen))


GIVE = """([how, target, items]) => { const data = new DataTransfer();
    for (const [name, type, base64] of items) {
        const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
        data.items.add(new File([bytes], name, {type})); }
    const shared = {bubbles: true, cancelable: true};
    const event = how === "paste" ? new ClipboardEvent(how, {...shared, clipboardData: data})
        : new DragEvent(how, {...shared, dataTransfer: data});
    return document.querySelector(target).dispatchEvent(event); }"""


def give(page: Page, how: str, target: str, *given: FilePayload) -> None:
    """Drop or paste pictures; the browser's own answer to it must be prevented."""
    items = [
        [each["name"], each["mimeType"], base64.b64encode(each["buffer"]).decode()]
        for each in given
    ]
    assert page.evaluate(GIVE, [how, target, items]) is False


def sent(message: dict[str, Any]) -> list[Image.Image]:
    """The pictures of a message that the server got, which stand before its text."""
    parts = message["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert [part["type"] for part in parts[: len(urls)]] == ["image_url"] * len(urls)
    return [decoded(url) for url in urls]


def decoded(url: str) -> Image.Image:
    kind, _, data = url.partition(";base64,")
    made = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert kind == f"data:{Image.MIME[str(made.format)]}"
    return made


def send_one(script: Scripted, page: Page, content: bytes, kind: str = PNG) -> Image.Image:
    """Attach a picture, ask about it, and return what the server got."""
    pick(page, picture(content=content, kind=kind))
    expect(page.locator("#attached img")).to_have_count(1)
    say(script, page, "What is it?", "A cat.")
    (got,) = sent(script.bodies[-1]["messages"][-1])
    return got


def is_drawn(page: Page, name: str) -> None:
    """Wait until each of these elements shows its picture's pixels."""
    drawn = "(images) => images.every((each) => each.complete && each.naturalWidth > 0)"
    until(lambda: page.locator(name).evaluate_all(drawn))


def n_stored(page: Page) -> int:
    """How many pictures the browser keeps."""
    count = """() => new Promise((resolve) => { const request = indexedDB.open("treadle");
        request.onsuccess = () => { const found = request.result.transaction("pictures")
            .objectStore("pictures").count();
        found.onsuccess = () => { request.result.close(); resolve(found.result); }; }; })"""
    return int(page.evaluate(count))


# -- in -------------------------------------------------------------------------------------------


def test_a_picture_is_picked_and_sent(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add pictures").click()
    chooser.value.set_files([picture()])
    expect(page.locator("#attached").get_by_role("img", name="cat.png")).to_be_visible()
    is_drawn(page, "#attached img")
    expect(page.locator("#status")).to_have_text("Picture attached: cat.png, 40 by 20 pixels")
    expect(page.locator("#entry")).to_be_focused()
    say(sighted, page, "What is it?", "A cat.")
    (message,) = sighted.bodies[0]["messages"]
    (got,) = sent(message)
    assert got.size == (40, 20)
    assert message["content"][1] == {"type": "text", "text": "What is it?"}
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator(".user").get_by_role("img", name="cat.png")).to_be_visible()
    is_drawn(page, ".user img")


def test_pictures_are_dropped_and_pasted(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    blue = painted((30, 30), "RGB", "BMP")
    give(page, "drop", "#log", picture("one.png"), picture("two.bmp", blue, "image/bmp"))
    expect(page.locator("#attached img")).to_have_count(2)
    give(page, "paste", "#entry", picture("image.png"))
    expect(page.locator("#attached img")).to_have_count(3)
    alts = [img.get_attribute("alt") for img in page.locator("#attached img").all()]
    assert alts == ["one.png", "two.bmp", "pasted picture"]
    say(sighted, page, "And these?", "Three.")
    assert [got.size for got in sent(sighted.bodies[0]["messages"][0])] == [
        (40, 20),
        (30, 30),
        (40, 20),
    ]


def test_pictures_and_texts_are_told_apart_by_content(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    drawing = picture("drawing.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")
    files = [file("photo.txt", painted((8, 8), "RGB", "WEBP")), file("BM.txt", "BMW, MM and II*")]
    page.set_input_files("#attach-file", [*files, drawing])
    expect(page.locator("#attached li")).to_have_count(3)
    expect(page.locator("#attached .picture")).to_have_count(1)
    expect(page.locator("#notice")).to_be_hidden()
    say(sighted, page, "Which?", "Both.")
    picture_part, text_part = sighted.bodies[0]["messages"][0]["content"]
    assert decoded(picture_part["image_url"]["url"]).size == (8, 8)
    assert text_part["text"].startswith("BM.txt:\n```\nBMW, MM and II*\n```\n\ndrawing.svg:")


def test_a_message_may_be_a_picture_alone(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    pick(page, picture("my cat.png"))
    expect(page.locator("#attached img")).to_have_count(1)
    say(sighted, page, "", "A cat.")
    (message,) = sighted.bodies[0]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    expect(page.locator("#talks a")).to_have_text(["my cat.png"])
    expect(page.locator(".user .plain")).to_be_hidden()  # an empty box says nothing


def test_a_message_waits_for_its_pictures(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    page.evaluate(
        """() => { const decode = window.createImageBitmap; window.createImageBitmap =
        (...given) => new Promise((done) => { window.go = () => done(decode(...given)); }); }"""
    )
    give(page, "drop", "#entry", picture())
    expect(page.locator("#attached li")).to_have_text(["Reading cat.png…"])
    expect(page.locator("#status")).to_have_text("Reading cat.png")
    sighted.answers.append([says("A cat."), end()])
    ask(page, "What is it?")
    page.press("#entry", "Enter")  # a second time changes nothing
    until(lambda: page.evaluate("Boolean(window.go)"))
    assert not sighted.bodies
    page.evaluate("window.go()")
    expect(page.locator(".assistant .markdown")).to_have_text("A cat.")
    assert len(sent(sighted.bodies[0]["messages"][0])) == 1
    assert len(sighted.bodies) == 1


# -- what is sent ---------------------------------------------------------------------------------


def test_a_large_picture_is_scaled_down(sighted: Scripted, visit: Opened) -> None:
    got = send_one(sighted, visit(sighted.url), painted((1501, 5000)))
    assert got.size == (615, 2048)
    assert got.format == "JPEG"
    above, below = got.getpixel((300, 500)), got.getpixel((300, 1500))
    assert np.abs(np.subtract(np.array(above), (255, 0, 0))).max() <= JPEG_OFF
    assert np.abs(np.subtract(np.array(below), (0, 0, 255))).max() <= JPEG_OFF


def test_thin_lines_survive_the_scaling(sighted: Scripted, visit: Opened) -> None:
    """Stripes finer than a pixel become their mean. Bilinear scaling in one go would see two of
    eight columns, and make them black or white.
    """
    stripes = np.zeros((64, 16384), np.uint8)
    stripes[:, ::4] = 255  # a quarter of all columns
    out = io.BytesIO()
    Image.fromarray(stripes, "L").convert("RGB").resize((16384, 128)).save(out, "PNG")
    got = send_one(sighted, visit(sighted.url), out.getvalue())
    assert got.size == (2048, 16)
    assert np.abs(np.asarray(got.convert("L"), int) - 64).max() <= JPEG_OFF


def test_a_picture_is_sent_upright_and_without_metadata(sighted: Scripted, visit: Opened) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    exif[0x010F] = "SecretCamera"
    raw = painted((60, 40), "RGB", "JPEG", exif=exif, quality=95, comment=b"SecretCamera")
    assert raw.count(b"SecretCamera") == 2
    page = visit(sighted.url)
    got = send_one(sighted, page, raw, "image/jpeg")
    assert got.size == (40, 60)
    assert not got.getexif()
    assert "SecretCamera" not in json.dumps(sighted.bodies)
    url = sighted.bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert b"SecretCamera" not in base64.b64decode(url.partition(",")[2])
    left = np.array(got.getpixel((5, 30)))  # blue was below
    right = np.array(got.getpixel((35, 30)))
    assert np.abs(np.subtract(left, (0, 0, 255))).max() <= JPEG_OFF
    assert np.abs(np.subtract(right, (255, 0, 0))).max() <= JPEG_OFF


def test_transparency_stays(sighted: Scripted, visit: Opened) -> None:
    """To the bit: 100 of 255 is a level that canvases, which multiply by it, keep of 0 and 255."""
    raw = painted((50, 30), "RGBA")
    got = send_one(sighted, visit(sighted.url), raw)
    assert (got.format, got.mode) == ("PNG", "RGBA")
    assert np.array_equal(np.asarray(got), np.asarray(Image.open(io.BytesIO(raw))))


def test_a_large_transparent_picture_is_put_on_white(sighted: Scripted, visit: Opened) -> None:
    """Noise that no PNG makes smaller: a request has no room for a dozen of these."""
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1200, 4), np.uint8)
    noise[:64, :64] = (0, 0, 0, 0)
    out = io.BytesIO()
    Image.fromarray(noise, "RGBA").save(out, "PNG")
    got = send_one(sighted, visit(sighted.url), out.getvalue())
    assert (got.format, got.size) == ("JPEG", (1200, 1200))
    assert np.asarray(got)[8:48, 8:48].min() >= 255 - JPEG_OFF


def test_the_first_frame_of_an_animation_is_sent(sighted: Scripted, visit: Opened) -> None:
    frames = [Image.new("RGB", (40, 20), colour) for colour in ("red", "lime", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    got = send_one(sighted, visit(sighted.url), out.getvalue(), "image/gif")
    assert np.abs(np.subtract(np.asarray(got, int), (255, 0, 0))).max() <= JPEG_OFF


# -- refused --------------------------------------------------------------------------------------

REFUSED = {
    "not.png": "not a picture: expected PNG, JPEG",
    "empty.png": "not a picture: expected PNG, JPEG",
    "cut.png": "damaged, or of a format that this browser cannot read",
    "bomb.png": "damaged, or of a format that this browser cannot read",
    "flat.png": "12000 × 12000 pixels: the limit is 64 million",
    "tall.png": "1 × 400 pixels: one side is more than 200 times the other",
}


def test_what_is_no_picture_is_refused_in_words(
    sighted: Scripted, visit: Opened, data: Path
) -> None:
    page = visit(sighted.url)
    for name, why in REFUSED.items():
        give(page, "drop", "#entry", picture(name, (data / "media/media" / name).read_bytes()))
        expect(page.locator("#notice")).to_contain_text(f"{name}: ")
        expect(page.locator("#notice")).to_contain_text(why)
    expect(page.locator("#attached li")).to_have_count(0)
    every = [picture(name, (data / "media/media" / name).read_bytes()) for name in REFUSED]
    pick(page, *every, picture())
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("#notice")).to_contain_text("not.png, empty.png: not a picture")
    expect(page.locator("#notice")).to_contain_text("cut.png, bomb.png: the picture is damaged")


def test_a_text_is_no_picture_for_the_button_of_pictures(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    pick(page, file("notes.txt", "words"))
    expect(page.locator("#notice")).to_contain_text("notes.txt: not a picture")
    expect(page.locator("#attached li")).to_have_count(0)


def test_a_file_of_a_hundred_megabytes_is_not_read(
    sighted: Scripted, visit: Opened, tmp_path: Path
) -> None:
    large = tmp_path / "scan.png"
    with large.open("wb") as to:
        to.write(painted((4, 4)))
        to.truncate(100_000_001)
    page = visit(sighted.url)
    page.set_input_files("#picture-file", large)
    expect(page.locator("#notice")).to_contain_text("scan.png: larger than 100 MB")
    expect(page.locator("#attached li")).to_have_count(0)


def test_as_many_pictures_as_the_server_takes(sighted: Scripted, visit: Opened) -> None:
    """Over the whole conversation: each request has all of them."""
    most = MediaLimits().per_request
    page = visit(sighted.url)
    pick(page, *[picture(f"{i}.png") for i in range(most - 1)])
    expect(page.locator("#attached img")).to_have_count(most - 1)
    say(sighted, page, "What are they?", "Cats.")
    pick(page, *[picture(f"more {i}.png") for i in range(6)])
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("#notice")).to_contain_text(
        f"more 1.png, more 2.png, more 3.png and 2 more: a conversation can have {most} pictures"
    )
    say(sighted, page, "And this?", "A cat.")
    assert sum(len(sent(m)) for m in sighted.bodies[1]["messages"] if m["role"] == "user") == most
    page.click("#new")
    pick(page, picture())
    expect(page.locator("#attached img")).to_have_count(1)


def test_a_model_without_eyes(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    expect(page.locator("#attach")).to_be_visible()
    expect(page.locator("#picture")).to_be_hidden()
    for how, target in (("drop", "#log"), ("paste", "#entry")):
        give(page, how, target, picture("cat.png"))
        expect(page.locator("#notice")).to_contain_text("cat.png: scripted does not read pictures")
        page.locator("#notice").get_by_role("button", name="Close").click()
    expect(page.locator("#attached li")).to_have_count(0)


def test_a_model_without_eyes_goes_on_with_a_conversation(sighted: Scripted, visit: Opened) -> None:
    """The server puts a sentence in place of each picture, and says so."""
    page = visit(sighted.url)
    send_one(sighted, page, painted((40, 20)))
    sighted.props["modalities"]["vision"] = False
    page.reload()
    expect(page.locator("#picture")).to_be_hidden()
    last = end("length")
    last["warnings"] = ["messages[0].content[0]: the picture is left out"]
    sighted.answers.append([says("No idea."), last])
    ask(page, "And now?")
    expect(page.locator(".note").last).to_have_text(
        "Stopped at the token limit · messages[0].content[0]: the picture is left out"
    )
    assert len(sent(sighted.bodies[1]["messages"][0])) == 1


def test_text_mode_has_no_pictures(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    pick(page, picture())
    expect(page.locator("#attached img")).to_have_count(1)
    say(sighted, page, "What is it?", "A cat.")
    page.click("#settings-open")
    page.locator("#set-mode").select_option("text")
    page.click("#settings-close")
    expect(page.locator("#picture")).to_be_hidden()
    give(page, "drop", "#log", picture("dog.png"))
    expect(page.locator("#notice")).to_contain_text("dog.png: text mode has no pictures")
    ask(page, "And then")
    expect(page.locator(".note.wrong")).to_contain_text(
        "Text mode has no pictures or sounds: set Mode"
    )
    assert len(sighted.bodies) == 1


def test_a_request_that_is_too_large_is_not_sent(sighted: Scripted, visit: Opened) -> None:
    sighted.props["treadle"]["max_body_bytes"] = 2_000_000
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise, "RGB").save(out, "JPEG")
    page = visit(sighted.url)
    pick(page, picture("noise.jpg", out.getvalue()))
    expect(page.locator("#attached img")).to_have_count(1)
    ask(page, "What is it?")
    expect(page.locator(".note.wrong")).to_contain_text(
        re.compile(r"The conversation is \d\.\d MB with its pictures.*the server takes 2\.0 MB")
    )
    assert not sighted.bodies


# -- alt text -------------------------------------------------------------------------------------


def test_the_alt_text_is_read_in_place_of_the_picture(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    pick(page, picture("a.png"), picture("b.png"))
    alt = page.get_by_label("Alt text of a.png")
    expect(alt).to_have_value("a.png")
    alt.fill("A <b>cat</b> that sleeps")
    expect(page.locator("#attached img").first).to_have_attribute("alt", "A <b>cat</b> that sleeps")
    alt.press("Enter")  # goes on to the message, and does not send it
    expect(page.locator("#entry")).to_be_focused()
    page.get_by_label("Alt text of b.png").fill("")
    assert not sighted.bodies
    say(sighted, page, "What is it?", "Cats.")
    log = page.get_by_role("log")
    expect(log.get_by_role("button", name="A <b>cat</b> that sleeps")).to_be_visible()
    expect(log.get_by_role("img", name="b.png")).to_be_visible()  # never without a name
    assert "sleeps" not in json.dumps(sighted.bodies)  # the model sees for itself
    page.get_by_label("Search conversations").fill("sleeps")
    expect(page.locator("#talks a")).to_have_text(["What is it?"])


def test_a_picture_is_removed(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    pick(page, picture("a.png"), picture("b.png", painted((10, 30))))
    page.get_by_role("button", name="Remove a.png").click()
    expect(page.locator("#attached img")).to_have_count(1)
    expect(page.locator("#entry")).to_be_focused()
    until(lambda: n_stored(page) == 1)
    say(sighted, page, "What is it?", "A cat.")
    (got,) = sent(sighted.bodies[0]["messages"][0])
    assert got.size == (10, 30)


def test_a_picture_is_enlarged(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    got = send_one(sighted, page, painted((900, 600)))
    shown = page.locator(".user .pictures button")
    shown.focus()
    page.keyboard.press("Enter")
    large = page.locator("#large img")
    expect(large).to_be_visible()
    expect(large).to_have_attribute("alt", "cat.png")
    small_box, large_box = page.locator(".user img").bounding_box(), large.bounding_box()
    assert small_box is not None
    assert large_box is not None
    assert small_box["width"] <= 240 < large_box["width"]
    assert large_box["width"] / large_box["height"] == pytest.approx(got.width / got.height, 0.02)
    expect(large).to_be_in_viewport(ratio=1)
    assert axe(page) == []
    page.keyboard.press("Escape")
    expect(large).to_be_hidden()
    expect(shown).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: str, sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url, color_scheme=scheme)
    send_one(sighted, page, painted((300, 200), "RGBA"))
    pick(page, picture("b.png"))
    expect(page.locator("#attached img")).to_have_count(1)
    assert axe(page) == []


def test_nothing_is_wider_than_320_px(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url, viewport={"width": 320, "height": 600})
    send_one(sighted, page, painted((4000, 100)))
    pick(page, picture(f"{'long ' * 30}.png", painted((4000, 100))), picture())
    expect(page.locator("#attached img")).to_have_count(2)
    for name in ("html", "#log", "#form", "#attached"):
        assert page.locator(name).evaluate("each => each.scrollWidth") <= 320, name
    for name in ("#send", "#attach", "#picture"):
        expect(page.locator(name)).to_be_in_viewport(ratio=1)


# -- kept -----------------------------------------------------------------------------------------


def test_a_reload_keeps_pictures(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    send_one(sighted, page, painted((40, 20)))
    pick(page, picture("next.png", painted((20, 40))))
    page.get_by_label("Alt text of next.png").fill("The next one")
    page.reload()
    expect(page.locator(".user").get_by_role("img", name="cat.png")).to_be_visible()
    is_drawn(page, ".user img")
    expect(page.locator("#attached").get_by_role("img", name="The next one")).to_be_visible()
    is_drawn(page, "#attached img")
    say(sighted, page, "And this?", "Another.")
    first, _, second = sighted.bodies[1]["messages"]
    assert first == sighted.bodies[0]["messages"][0]  # the same bytes, so the server knows them
    assert [got.size for got in sent(second)] == [(20, 40)]
    page.reload()
    expect(page.locator("#attached li")).to_have_count(0)


def test_regenerate_edit_and_continue_keep_pictures(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    send_one(sighted, page, painted((40, 20)))
    content = sighted.bodies[0]["messages"][0]["content"]
    sighted.answers.append([says("A dog"), threading.Event()])
    page.click('[data-does="again"]')
    expect(page.locator(".assistant .markdown")).to_have_text("A dog")
    page.click("#stop")
    assert sighted.bodies[1]["messages"] == [{"role": "user", "content": content}]
    sighted.answers.append([says(", no: a cat."), end()])
    page.click('[data-does="resume"]')
    expect(page.locator(".assistant .markdown")).to_have_text("A dog, no: a cat.")
    expect(page.locator("#send")).to_be_visible()
    assert sighted.bodies[2]["messages"][0]["content"] == content
    sighted.answers.append([says("Red."), end()])
    page.locator('.user [data-does="edit"]').click()
    page.get_by_label("Edit message").fill("Which colour?")
    page.locator(".edit").get_by_role("button", name="Send").click()
    expect(page.locator(".assistant .markdown")).to_have_text("Red.")
    expect(page.locator("#send")).to_be_visible()
    picture_part, text_part = sighted.bodies[3]["messages"][0]["content"]
    assert picture_part == content[0]
    assert text_part["text"] == "Which colour?"
    is_drawn(page, ".user img")
    page.locator('.user [data-does="delete"]').click()  # the other version still has it
    expect(page.locator(".user .plain")).to_have_text("What is it?")
    page.reload()
    is_drawn(page, ".user img")
    assert n_stored(page) == 1
    page.locator('.user [data-does="delete"]').click()
    until(lambda: n_stored(page) == 0)


def test_pictures_go_with_their_conversation(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    send_one(sighted, page, painted((40, 20)))
    page.click("#new")
    send_one(sighted, page, painted((40, 20)))
    assert n_stored(page) == 2
    page.locator("#talks button").first.click()
    until(lambda: n_stored(page) == 1)
    talks = page.locator("#talks a")
    expect(talks).to_have_count(1)  # the list is drawn again after the store has changed
    talks.click()
    is_drawn(page, ".user img")


def test_what_is_exported_has_its_pictures(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    send_one(sighted, page, painted((40, 20), "RGBA"))
    with page.expect_download() as download:
        page.click("#export")
    text = download.value.path().read_text("utf-8")
    other = visit(sighted.url)
    for _ in range(2):  # each has its own
        other.set_input_files("#import-file", file("talks.json", text))
        expect(other.locator("#notice")).to_contain_text("Imported 1 conversation")
    until(lambda: n_stored(other) == 2)
    other.locator("#talks button").first.click()
    until(lambda: n_stored(other) == 1)
    talks = other.locator("#talks a")
    expect(talks).to_have_count(1)  # the list is drawn again after the store has changed
    talks.click()
    expect(other.locator(".user").get_by_role("img", name="cat.png")).to_be_visible()
    is_drawn(other, ".user img")
    say(sighted, other, "And now?", "Still.")
    assert sighted.bodies[1]["messages"][0] == sighted.bodies[0]["messages"][0]


def test_odd_pictures_of_a_file_are_left_out(sighted: Scripted, visit: Opened) -> None:
    good = base64.b64encode(painted((40, 20), "RGB", "WEBP")).decode()
    urls = {
        "good": f"data:image/webp;base64,{good}",
        "text": f"data:text/html;base64,{base64.b64encode(b'<script>window.hit = 1').decode()}",
        "svg": f"data:image/svg;base64,{base64.b64encode(b'<svg onload=hit()>').decode()}",
        "far": "http://127.0.0.1:9/leak.png",
        "broken": "data:image/png;base64,***",
        "number": 3,
    }
    held = [{"id": name, "name": name, "alt": f"alt {name}"} for name in (*urls, "gone", "good")]
    nodes = {"a": {"role": "user", "content": "Look", "pictures": [*held, "no object"]}}
    talk = {"title": "odd", "nodes": nodes, "leaf": "a", "pictures": urls}
    page = visit(sighted.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_input_files("#import-file", file("odd.json", json.dumps(talk)))
    expect(page.locator("#notice")).to_contain_text(
        "Pictures and sounds that could not be read: 6."
    )
    page.locator("#talks a").click()
    expect(page.locator(".user img")).to_have_count(2)
    is_drawn(page, ".user img")
    assert n_stored(page) == 1
    assert all(url.startswith((sighted.url, f"blob:{sighted.url}")) for url in asked)
    assert page.evaluate("window.hit") is None


def test_messages_of_other_programs_bring_their_pictures(sighted: Scripted, visit: Opened) -> None:
    url = f"data:image/png;base64,{base64.b64encode(painted((40, 20))).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Look"}]
    page = visit(sighted.url)
    messages = [{"role": "user", "content": parts}]
    page.set_input_files("#import-file", file("messages.json", json.dumps(messages)))
    page.get_by_role("link", name="Look").click()
    expect(page.locator(".user .plain")).to_have_text("Look")
    is_drawn(page, ".user img")
    sighted.answers.append([says("A cat."), end()])
    page.click('[data-does="answer"]')
    expect(page.locator(".assistant .markdown")).to_have_text("A cat.")
    assert sighted.bodies[0]["messages"] == messages


def test_a_browser_that_stores_no_picture_says_so(sighted: Scripted, visit: Opened) -> None:
    page = visit(sighted.url)
    page.evaluate(
        """() => { const put = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function (value) {
            if (value.blob) throw new DOMException("full", "QuotaExceededError");
            return put.call(this, value); }; }"""
    )
    pick(page, picture("cat.png"))
    expect(page.locator("#notice")).to_contain_text("cat.png: lost at a reload")
    say(sighted, page, "What is it?", "A cat.")
    assert len(sent(sighted.bodies[0]["messages"][0])) == 1
    is_drawn(page, ".user img")
    page.reload()
    missing = page.locator(".user").get_by_role("img", name="no longer stored in this browser")
    expect(missing).to_be_visible()
    page.click('[data-does="again"]')
    expect(page.locator(".note.wrong")).to_contain_text("cat.png: this browser no longer has")
    assert len(sighted.bodies) == 1


def test_conversations_of_an_earlier_page_stay(sighted: Scripted, visit: Opened) -> None:
    """The database of version 1 had no pictures."""
    page = visit(sighted.url, expected="404")  # favicon.ico
    page.goto(f"{sighted.url}page/icon.svg")  # the same origin, and nobody has the database open
    old = """() => new Promise((resolve) => { const gone = indexedDB.deleteDatabase("treadle");
        gone.onsuccess = () => { const made = indexedDB.open("treadle", 1);
            made.onupgradeneeded = () => made.result.createObjectStore("talks", {keyPath: "id"})
                .put({id: "t", title: "Old", system: "", made: 1, changed: 1, leaf: "a", nodes:
                    {a: {id: "a", parent: null, role: "user", content: "Hello", at: 1}}});
            made.onsuccess = () => { made.result.close(); resolve(); }; }; })"""
    page.evaluate(old)
    page.goto(sighted.url)
    page.get_by_role("link", name="Old").click()
    expect(page.locator(".user .plain")).to_have_text("Hello")
    pick(page, picture())
    expect(page.locator("#attached img")).to_have_count(1)
    assert n_stored(page) == 1


# -- answers --------------------------------------------------------------------------------------


def test_progress_while_pictures_are_read(sighted: Scripted, visit: Opened) -> None:
    """By the server: an earlier message's pictures are in its cache."""
    begun, more, whole = threading.Event(), threading.Event(), threading.Event()
    progress = {"total": 300, "cache": 0, "processed": 20, "time_ms": 100, "queue": 0}
    page = visit(sighted.url)
    pick(page, picture("a.png"), picture("b.png"))
    expect(page.locator("#attached img")).to_have_count(2)
    media = {"total": 2, "encoded": 1, "encoding_ms": 12300}
    told = says() | {"prompt_progress": progress | {"media": media}}
    seen = says() | {"prompt_progress": progress | {"media": media | {"encoded": 2}}}
    last = end()
    last["timings"] |= {"media_n": 2, "media_ms": 12340.0}
    sighted.answers.append(
        [says(role="assistant"), begun, told, more, seen, whole, says("Two."), last]
    )
    ask(page, "What are they?")
    note = page.locator(".note").last
    expect(note).to_have_text("Reading pictures…")
    begun.set()
    prompt = "Processing the prompt: 20 of 300 tokens"
    expect(note).to_have_text(f"Reading picture 2 of 2, 12 s · {prompt}")
    more.set()
    expect(note).to_have_text(prompt)
    whole.set()
    expect(page.locator(".assistant .markdown")).to_have_text("Two.")
    expect(page.locator(".stats")).to_contain_text("Reading pictures: 12.3 s")
    expect(page.locator("#send")).to_be_visible()
    later = threading.Event()
    sighted.answers.append([says(role="assistant"), later, says("Sure."), end()])
    ask(page, "Sure?")
    expect(note).to_have_text("Waiting for the first token…")
    later.set()
    expect(page.locator(".assistant .markdown").last).to_have_text("Sure.")
