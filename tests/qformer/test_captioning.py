"""Captions: what transformers' generation makes of our cached steps, against decoding without a cache."""

from dataclasses import replace

import pytest
import torch

from small_qformer import WIDER

pytest.importorskip("transformers")

from moe_zero.qformer.captioning import CaptionOptions, _Reading, write_captions
from moe_zero.qformer.objectives import QFormerPretraining

START, END, Q = 29, 7, 5
TOKENS = {"start_id": START, "end_id": END, "vocab_size": 30, "max_positions": 16}


@pytest.fixture(scope="module")
def model() -> QFormerPretraining:
    torch.manual_seed(3)
    config = replace(WIDER, vocab_size=30)
    model = QFormerPretraining(config, embed_dim=8).eval()
    model.qformer.cls.predictions.bias.data[END] = 1.5  # so that captions end
    return model


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    return torch.randn(4, 6, 20, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def scores(model, picture: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """[words read, V]: log-probabilities of the next word, everything in one pass without a cache."""
    output = model.qformer(image_features=picture[None], input_ids=torch.tensor([[START, *ids]]), causal=True)
    return model.qformer.next_word_logits(output.last_hidden_state[0, Q:]).log_softmax(-1)


def greedy(model, picture, words: int) -> list[int]:
    ids = []
    while len(ids) < words and (word := int(scores(model, picture, ids)[-1].argmax())) != END:
        ids.append(word)
    return ids


def beam_search(model, picture, beams: int, words: int) -> list[list[int]]:
    """Plain beam search: finished texts and running ones compete by mean log-probability, the end included."""
    running, finished = [(0.0, [])], []
    for _ in range(words):
        candidates = [
            (total + float(score), [*ids, word])
            for total, ids in running
            for word, score in enumerate(scores(model, picture, ids)[-1])
        ]
        best = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * beams]
        finished += [(total / len(ids), ids[:-1]) for total, ids in best[:beams] if ids[-1] == END]
        running = [candidate for candidate in best if candidate[1][-1] != END][:beams]
    finished += [(total / len(ids), ids) for total, ids in running]
    return [ids for _, ids in sorted(finished, key=lambda text: -text[0])]


def test_greedy_takes_the_best_word_each_time(model, pictures):
    found = write_captions(model, pictures, CaptionOptions(max_words=8, no_repeat=0), **TOKENS)
    assert found == [[greedy(model, picture, 8)] for picture in pictures]
    assert len({len(captions[0]) for captions in found}) > 1  # they end at different words


def test_beams_find_what_plain_beam_search_finds(model, pictures):
    options = CaptionOptions(beams=3, num_captions=2, max_words=4, no_repeat=0)
    found = write_captions(model, pictures, options, **TOKENS)
    for picture, captions in zip(pictures, found, strict=True):
        assert captions == beam_search(model, picture, 3, 4)[:2]


def test_sampling_draws_likely_words_and_follows_the_seed(model, pictures):
    options = CaptionOptions(sample=True, num_captions=5, max_words=5, top_p=0.5, no_repeat=0)
    torch.manual_seed(0)
    first = write_captions(model, pictures, options, **TOKENS)
    torch.manual_seed(0)
    assert write_captions(model, pictures, options, **TOKENS) == first
    assert len({tuple(ids) for ids in first[0]}) > 1
    for picture, captions in zip(pictures, first, strict=True):
        for ids in captions:
            rows = scores(model, picture, ids).exp()
            for row, word in zip(rows, ids, strict=False):
                likelier = row[row > row[word]].sum()
                assert likelier < 0.5 + 1e-4


def test_queries_look_once_and_each_word_is_read_once(model, pictures):
    calls = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((kwargs["task"], kwargs.get("input_ids"))), with_kwargs=True
    )
    write_captions(model, pictures, CaptionOptions(beams=2, max_words=4), **TOKENS)
    hook.remove()
    assert [task for task, _ in calls].count("look") == 1
    assert all(ids.shape == (8, 1) for task, ids in calls if task == "read")


def test_a_rank_that_has_finished_goes_on_calling_the_model(model, pictures):
    """transformers then asks for the words after the same words again, until the last rank has finished."""
    reading = _Reading(model(image_features=pictures, task="look"), torch.empty(4, 0, dtype=torch.long), 1)
    ids, calls = torch.full((4, 1), START), []
    expected = reading.next_words(ids, model)
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    reading.next_words(ids, model)
    hook.remove()
    assert calls == [1] and reading.cache.num_tokens == 1
    again = _Reading(model(image_features=pictures, task="look"), torch.empty(4, 0, dtype=torch.long), 1)
    torch.testing.assert_close(again.next_words(ids, model), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"beams": 0}, "beams is 0"),
        ({"num_captions": 3}, "num_captions is 3, but without sample"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        CaptionOptions(**options)
