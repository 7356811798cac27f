from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import small_qformer
from moe_zero.qformer import QFormerConfig, QFormerModel
from moe_zero.recipes.beams import trace_beams

SMALL = replace(small_qformer.SMALL, num_beams=4, max_position_embeddings=512)


def test_the_chosen_beam_followed_back_is_the_route_of_the_model():
    torch.manual_seed(0)
    model, image = QFormerModel(SMALL), torch.randn(1, 7, 20)
    layers = trace_beams(model, image)
    output = model(image_features=image)
    assert [layer.index for layer in layers] == [1, 2, 3]
    assert [len(layer.beams) for layer in layers] == [3, 3, 1]
    place, route = 0, []
    for layer in reversed(layers):
        beam = layer.beams[place]
        route.insert(0, beam.expert)
        place = beam.parent
    assert route == output.expert_route[0].tolist()
    assert layers[-1].beams[0].score == pytest.approx(output.beam_scores.item())
    for before, after in pairwise(layers):
        assert all(beam.score <= before.beams[beam.parent].score for beam in after.beams)


def test_a_model_without_beams_is_refused():
    with pytest.raises(ValueError, match="routes no beams"):
        trace_beams(QFormerModel(QFormerConfig(num_hidden_layers=1, num_experts=1, moe_layers=())), torch.zeros(1))
