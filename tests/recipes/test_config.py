import pytest
import yaml

from moe_zero.recipes.config import TrainConfig


def test_defaults_are_valid_and_survive_a_file(tmp_path):
    config = TrainConfig(moe_layers=(4, 5), lr=1e-4)
    config.save(tmp_path / "config.yaml")
    assert TrainConfig.load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": -1.0}, "lr is -1.0; it must be greater than 0"),
        ({"lr": "3e-4"}, "lr is '3e-4', a str; it must be a float"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"steps": True}, "steps is True, a bool; it must be an int"),
        ({"batch_size": 1}, "batch_size is 1"),
        ({"preset": "big"}, "preset is 'big'; it must be small or seed"),
        ({"objectives": ("itm",)}, "objectives is"),
        ({"objectives": ("itc", "lm2")}, "objectives is"),
        ({"objectives": ("itc",), "rerank": 4}, "rerank is 4"),
        ({"encoder": "resnet"}, "encoder is 'resnet'"),
        ({"encoder": "timm:resnet18"}, "encoder_checkpoint is None"),
        ({"encoder_checkpoint": "weights.pth"}, "encoder_checkpoint is 'weights.pth'"),
        ({"moe_layers": (9,)}, "moe_layers names layer 9"),
        ({"moe_layers": "3,x"}, "moe_layers is '3,x'"),
        ({"num_beams": 1}, "num_beams is 1"),
        ({"num_beams": 1000}, "num_beams is 1000; it must be at most 9: 2 routed experts in 3 layers make 8 different"),
        ({"warmup_steps": 51}, "warmup_steps is 51; it must be from 0 to steps, which is 50"),
        ({"data": " "}, "data is ' '; it must be photographs"),
        ({"min_lr": 1.0}, "min_lr is 1.0; it must be at most lr"),
    ],
)
def test_wrong_value_is_named(changes, named):
    with pytest.raises(ValueError, match=r"must be|layers are") as error:
        TrainConfig(**changes)
    assert named in str(error.value)


def test_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("lr: 0.001\nsteps: 7\nmoe_layers: [4, 5]\nobjectives: [itc]\n")
    config = TrainConfig.load(file, {"steps": 9, "objectives": "itc,itm"})
    assert (config.lr, config.steps, config.moe_layers, config.objectives) == (0.001, 9, (4, 5), ("itc", "itm"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rate: 1.0", "unknown setting learning_rate"),
        ("- lr", "holds a list"),
        ("lr: -1.0", "lr is -1.0"),
        ("a: [", "YAML"),
    ],
)
def test_bad_file_is_named(tmp_path, text, named):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"my.yaml") as error:
        TrainConfig.load(file)
    assert named in str(error.value)


def test_presets_and_architecture():
    small = TrainConfig().qformer(1280)
    assert (small.hidden_size, small.num_hidden_layers, small.moe_layers, small.encoder_width) == (
        384,
        6,
        (3, 4, 5),
        1280,
    )
    seed = TrainConfig(preset="seed").qformer(1408)
    assert (seed.hidden_size, seed.num_hidden_layers, seed.moe_layers) == (768, 12, (6, 7, 8, 9, 10, 11))
    changed = TrainConfig(num_hidden_layers=4, num_experts=5, num_beams=4, num_query_tokens=8).qformer(64)
    assert (changed.moe_layers, changed.num_experts, changed.num_beams, changed.num_query_tokens) == ((2, 3), 5, 4, 8)


def test_resume_refuses_other_settings():
    with pytest.raises(ValueError, match=r"lr is 0.001, but the run in .* was started with 0.0003"):
        TrainConfig(lr=0.001).check_resumes(TrainConfig())
    TrainConfig(nproc=2, out="elsewhere").check_resumes(TrainConfig())


def test_saved_file_is_plain_yaml(tmp_path):
    TrainConfig().save(tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert values["objectives"] == ["itc", "itm", "lm"]
    assert values["lr"] == TrainConfig.lr
