import pytest
import torch

from moe_zero.recipes.batches import BatchSource
from moe_zero.recipes.data import load_data
from moe_zero.recipes.tokenizer import CaptionTokenizer

BATCH = 4


class NumberedFeatures:
    """Stands for a `FeatureStore`: the features of crop 2 of the picture at place 5 are [[5, 2]]."""

    def __init__(self, pictures):
        self.place = {picture.digest: place for place, picture in enumerate(pictures)}

    def read(self, picture, crops, index):
        return torch.tensor([[self.place[picture.digest], index]], dtype=torch.float16)


@pytest.fixture(scope="module")
def source(table):
    pictures = load_data(str(table)).train
    return BatchSource(pictures, [range(3)] * len(pictures), NumberedFeatures(pictures), CaptionTokenizer(16), BATCH, 7)


def test_a_batch_is_a_function_of_its_step(source):
    later = source.batch(11)
    again = source.batch(3), source.batch(11)
    assert all(torch.equal(a, b) for a, b in zip(later, again[1], strict=True))
    assert not torch.equal(again[0].negative_draws, later.negative_draws)


def test_ranks_get_the_parts_of_the_global_batch(source):
    whole = source.batch(5)
    parts = [source.batch(5, rank, 2) for rank in (0, 1)]
    for tensor, *pieces in zip(whole, *parts, strict=True):
        assert torch.equal(tensor, torch.cat(pieces))


def test_every_picture_comes_once_in_an_epoch(source):
    seen = torch.cat([source.batch(step).image_ids for step in range(5)])
    assert seen.view(4, 5).sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 4


def test_features_and_captions_belong_to_the_picture(source):
    tokenizer = CaptionTokenizer(16)
    for step in range(8):
        batch = source.batch(step)
        assert batch.image_features[:, 0, 0].long().tolist() == batch.image_ids.tolist()
        for picture, ids, mask in zip(batch.image_ids, batch.input_ids, batch.attention_mask, strict=True):
            captions = source.pictures[picture].train_captions
            wanted = tokenizer(captions, length=len(ids))[0]
            assert (wanted == ids).all(1).any()
            assert mask.sum() == (ids != 0).sum()


def test_all_crops_and_captions_are_used(source):
    batches = [source.batch(step) for step in range(60)]
    crops = torch.cat([torch.stack([batch.image_ids, batch.image_features[:, 0, 1].long()], 1) for batch in batches])
    captions = torch.cat([batch.input_ids for batch in batches])
    assert len(crops.unique(dim=0)) == 5 * 3
    assert len(captions.unique(dim=0)) == sum(len(picture.train_captions) for picture in source.pictures)
