import pytest
from PIL import Image

from moe_zero.recipes.crops import MAX_OVERLAP, Crop, centre, evaluation_crops, overlap, training_crops

SIZES = [(512, 512), (448, 172), (64, 600), (1411, 1411)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_evaluation_crop_is_trained_on(size, seed):
    held_out = evaluation_crops("digest", size, 4, seed)
    crops = training_crops("digest", size, 24, seed, held_out)
    assert max(overlap(a, b) for a in held_out for b in crops) < MAX_OVERLAP
    for crop in (*held_out, *crops):
        assert 0 <= crop.left < crop.right <= size[0] and 0 <= crop.top < crop.bottom <= size[1]


def test_crops_depend_on_content_and_seed_alone():
    def draw(digest="x", seed=0, count=6):
        return training_crops(digest, (100, 80), count, seed, evaluation_crops(digest, (100, 80), 2, seed))

    assert draw() == draw()
    assert draw(count=3) == draw()[:3]
    assert draw(seed=1) != draw() and draw(digest="y") != draw()


def test_a_picture_of_one_pixel_still_has_crops():
    held_out = evaluation_crops("x", (1, 1), 2, 0)
    assert len(training_crops("x", (1, 1), 3, 0, held_out)) == 3


def test_overlap():
    assert overlap(Crop(0, 0, 10, 10), Crop(0, 0, 10, 10)) == 1
    assert overlap(Crop(0, 0, 10, 10), Crop(5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert overlap(Crop(0, 0, 10, 10), Crop(10, 0, 20, 10)) == 0


def test_apply_cuts_and_flips():
    image = Image.new("RGB", (40, 20), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    left = Crop(0, 0, 20, 20).apply(image, 8)
    assert left.size == (8, 8) and left.getpixel((4, 4)) == (255, 255, 255)
    flipped = Crop(0, 0, 40, 20, flip=True).apply(image, 8)
    assert flipped.getpixel((0, 4)) == (0, 0, 0) and flipped.getpixel((7, 4)) == (255, 255, 255)
    assert centre((40, 20)) == Crop(10, 0, 30, 20)
