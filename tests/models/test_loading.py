"""Loading: every form in which a model lies on a disk, by one function."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from command import failed, make_run, run
from support_tokens.errors import RunFolderError
from support_tokens.models import find_model, load_config, load_model, load_tokenizer
from support_tokens.report.records import GenerationRecord

IDS = torch.arange(2, 12).unsqueeze(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    return make_run(tmp_path_factory.mktemp("loading") / "run", layers=2)


def adapter_of(folder: Path, base: Path, config) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, and then the adapter changes nothing
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(trained, tmp_path_factory) -> Path:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    return adapter_of(tmp_path_factory.mktemp("adapter"), trained, config)


def test_an_adapter_is_its_base_with_its_weights_merged(trained, adapter) -> None:
    model, tokenizer = load_model(adapter, dtype="float64")
    base = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float64)
    plain = base(IDS).logits
    expected = PeftModel.from_pretrained(base, adapter).double().eval()(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-6, atol=1e-6)
    assert (expected - plain).abs().max() > 1e-3
    assert not model.training
    assert tokenizer("abc")["input_ids"] == load_tokenizer(trained)("abc")["input_ids"]
    assert load_config(adapter).n_layer == 2


def test_a_run_and_its_checkpoint_are_one_model(trained) -> None:
    (one, _), (other, _) = load_model(trained), load_model(trained / "model")
    assert torch.equal(one(IDS).logits, other(IDS).logits)


def test_files_are_found_in_every_form(tmp_path, trained, adapter) -> None:
    model = str(trained / "model")
    assert find_model(trained) == find_model(model)
    assert (find_model(model).source, find_model(adapter).source) == (model, model)
    assert find_model(adapter).adapter == str(adapter)
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "a.gguf").touch()
    expected = find_model(folder, "a.gguf")
    assert (expected.source, expected.gguf_file) == (str(folder), "a.gguf")
    assert find_model(folder) == find_model(folder / "a.gguf") == expected
    (folder / "b.gguf").touch()
    with pytest.raises(RunFolderError, match="one GGUF file of 2"):
        find_model(folder)
    assert find_model("owner/name").source == "owner/name"


def test_an_adapter_that_cannot_be_merged_or_read_is_one_sentence(tmp_path, trained, adapter) -> None:
    prompts = adapter_of(tmp_path / "prompts", trained, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(RunFolderError, match="must change weights, as LoRA does, received PROMPT_TUNING"):
        load_model(prompts)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    (pickled / "adapter_model.bin").touch()
    with pytest.raises(RunFolderError, match=r"weights in adapter_model\.safetensors"):
        load_model(pickled)
    (pickled / "adapter_config.json").write_text("{}")
    with pytest.raises(RunFolderError, match="does not name its base model"):
        load_model(pickled)


@pytest.mark.parametrize(("folder", "package"), [("adapter", "peft"), ("gguf", "gguf")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, tmp_path, adapter, folder, package) -> None:
    from support_tokens.models import loading

    (tmp_path / "a.gguf").touch()
    model = adapter if folder == "adapter" else tmp_path
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    code = run(monkeypatch, "analyze", "--model", model, "--text", "abc")
    extra = {"peft": "adapters"}.get(package, package)
    failed(code, capsys.readouterr(), f"the package {package} is not installed", f"support-tokens[{extra}]")


def test_every_verb_takes_an_adapter(monkeypatch, capsys, tmp_path, trained, adapter) -> None:
    assert run(monkeypatch, "analyze", "--model", adapter, "--text", "abc") == 0
    words = ["--prompt", "abc", "--max-new-tokens", 2, "--json", tmp_path / "g.json"]
    assert run(monkeypatch, "generate", "--model", adapter, *words) == 0
    assert len(GenerationRecord.from_json(tmp_path / "g.json").generations[0].tokens) == 2
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log " * 80, encoding="utf-8")
    words = ["--data", text, "--output", tmp_path / "out", "--sequences", 2, "--context", 16, "--sigma", 0.5]
    assert run(monkeypatch, "evaluate", trained / "model", adapter, *words) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "report.json").is_file()
