"""What counts as naming an object, and the chance level beside it."""

import pytest

from moe_zero.recipes.captions import CaptionEvaluation, PictureCaptions, names_one_of
from moe_zero.recipes.photographs import CAPTIONS, OBJECTS
from moe_zero.recipes.routing import LayerLoad


@pytest.mark.parametrize(
    ("caption", "accepted", "right"),
    [
        ("a Cat on a mat", ("cat",), True),
        ("a category", ("cat",), False),
        ("a space suit", ("space suit",), True),
        ("", ("cat",), False),
        ("a cat", (), False),
    ],
)
def test_an_object_is_named_by_a_whole_word(caption, accepted, right):
    assert names_one_of(caption, accepted) is right


def test_accuracies_and_chance_are_counted():
    written = CaptionEvaluation(
        (
            PictureCaptions("a", ("a cat", "a cat", "a dog"), ("cat",)),
            PictureCaptions("b", ("a cat", "a dog", "a tree"), ("dog",)),
            PictureCaptions("c", ("anything",) * 3, ()),
        )
    )
    found = written.figures()
    assert found["object_accuracy"] == 0.5 and found["judged_pictures"] == 2  # b: only one of three
    assert found["caption_accuracy"] == pytest.approx(3 / 6)
    assert found["chance"] == pytest.approx((3 + 2) / 12)  # six captions under each of two pictures
    assert [own["named"] for own in found["pictures"]] == [2, 1, None]


def test_every_photograph_has_words_and_its_captions_mostly_use_them():
    assert OBJECTS.keys() == CAPTIONS.keys()
    for name, (train, held_out) in CAPTIONS.items():
        right = [names_one_of(caption, OBJECTS[name]) for caption in (*train, *held_out)]
        assert sum(right) > len(right) / 2, name


def test_load_entropy_and_dead_experts():
    even, one = LayerLoad.of(3, [0.25] * 4), LayerLoad.of(4, [0.0, 1.0, 0.0])
    assert even.entropy == pytest.approx(1) and even.dead == ()
    assert one.entropy == 0 and one.dead == (0, 2)
    assert LayerLoad.of(0, [1.0]).entropy == 1
