import json

import pytest
from PIL import Image

from moe_zero.recipes import photographs
from moe_zero.recipes.data import DataError, PictureIndex, load_data, read_image


def write(folder, rows, name="captions.jsonl"):
    file = folder / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(("a", "b", "c")):
        Image.new("RGB", (20 + number, 10), (50 * number, 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


GOOD = [{"image": "a.png", "caption": "first"}, {"image": "b.png", "caption": "second"}]


def test_default_photographs_are_real_many_and_captioned():
    data = load_data("photographs")
    assert len(data.pictures) >= 16
    assert len({picture.digest for picture in data.pictures}) == len(data.pictures)
    wordings = [caption for train, held_out in photographs.CAPTIONS.values() for caption in (*train, *held_out)]
    assert len(set(wordings)) == len(wordings)
    for picture in data.pictures:
        assert len(picture.train_captions) >= 4 and len(picture.eval_captions) >= 2
        assert picture.held_out_captions
        assert min(picture.size) >= 150


def test_jsonl_and_csv_give_the_same(folder):
    table = folder / "captions.csv"
    table.write_text('image,caption\na.png,first\nb.png,"second, with comma"\n')
    rows = [GOOD[0], {"image": "b.png", "caption": "second, with comma"}]
    assert load_data(str(table)) == load_data(write(folder, rows))


def test_last_of_several_captions_is_held_out(folder):
    rows = [*GOOD, {"image": "a.png", "caption": "another"}, {"image": "a.png", "caption": "held out"}]
    first, second = load_data(write(folder, rows)).pictures
    assert (first.train_captions, first.eval_captions) == (("first", "another"), ("held out",))
    assert first.held_out_captions
    assert (second.train_captions, second.eval_captions) == (("second",), ("second",))
    assert not second.held_out_captions


def test_split_column_decides(folder):
    rows = [dict(row, split="train") for row in GOOD]
    rows.append({"image": "c.png", "caption": "third", "split": "eval"})
    data = load_data(write(folder, rows))
    assert [picture.name for picture in data.train] == ["a.png", "b.png"]
    assert [picture.name for picture in data.eval] == ["c.png"]


def test_same_content_is_the_same_picture(folder):
    (folder / "copy.png").write_bytes((folder / "a.png").read_bytes())
    data = load_data(write(folder, [*GOOD, {"image": "copy.png", "caption": "copied"}]))
    assert len(data.pictures) == 2


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"image": "missing.png", "caption": "x"}, "image 'missing.png' does not exist"),
        ({"image": "broken.png", "caption": "x"}, "no image that Pillow reads"),
        ({"image": "cut.png", "caption": "x"}, "no image that Pillow reads"),
        ({"image": "a.png", "caption": "  "}, "caption is '  '; it must be a sentence"),
        ({"image": "a.png"}, "caption is None"),
        ({"image": "", "caption": "x"}, "image is ''"),
        ({"image": "a.png", "caption": "x", "split": "test"}, "split is 'test'"),
        ("not json", "no valid JSON"),
        ("[1]", "it must be an object"),
    ],
)
def test_bad_row_names_its_line_or_is_skipped_and_counted(folder, row, named):
    (folder / "broken.png").write_text("no picture")
    Image.effect_noise((64, 64), 50).save(folder / "cut.png")
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:2000])
    file = write(folder, [GOOD[0], row, GOOD[1]])
    with pytest.raises(DataError, match=r"captions.jsonl:2: ") as error:
        load_data(file)
    assert named in str(error.value) and "--skip-bad" in str(error.value)
    data = load_data(file, skip_bad=True)
    assert len(data.pictures) == 2 and len(data.skipped) == 1
    assert named in data.skipped[0]


def test_unusable_tables(folder):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_data(str(folder / "nothing.jsonl"))
    with pytest.raises(DataError, match="no column caption"):
        load_data(write(folder, ["image,text", "a.png,x"], "other.csv"))
    with pytest.raises(DataError, match=r"must be a .jsonl or .csv"):
        load_data(write(folder, ["x"], "captions.txt"))
    with pytest.raises(DataError, match="it needs at least 2 and 1"):
        load_data(write(folder, GOOD[:1]))


def test_index_spares_a_second_look_and_sees_changes(folder, monkeypatch):
    file = write(folder, GOOD)
    first = load_data(file, index=PictureIndex(folder / "cache"))
    monkeypatch.setattr("moe_zero.recipes.data.read_image", lambda path: pytest.fail("looked again"))
    assert load_data(file, index=PictureIndex(folder / "cache")) == first
    monkeypatch.undo()
    Image.new("RGB", (33, 44)).save(folder / "a.png")
    assert load_data(file, index=PictureIndex(folder / "cache")).pictures[0].size == (33, 44)


def test_pictures_are_turned_upright(folder):
    image = Image.new("RGB", (30, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(folder / "turned.jpg", exif=exif)
    assert read_image(folder / "turned.jpg").size == (10, 30)


def test_a_comma_in_an_unquoted_caption_is_an_error_that_names_the_line(tmp_path):
    table = tmp_path / "captions.csv"
    table.write_text("image,caption\na.png,a dog, on a beach\n")
    with pytest.raises(DataError, match=r"captions\.csv:2: more fields than columns"):
        load_data(str(table))


def test_text_that_is_not_utf8_is_an_error_that_names_the_line(tmp_path):
    table = tmp_path / "captions.csv"
    table.write_bytes("image,caption\na.png,a café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"captions\.csv:2: not UTF-8 text"):
        load_data(str(table))


def test_a_folder_is_not_a_table(tmp_path):
    with pytest.raises(DataError, match="data is the folder"):
        load_data(str(tmp_path))
