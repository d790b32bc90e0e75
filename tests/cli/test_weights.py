"""The command `to-safetensors`: files beside the pickles, one line each, and errors that help."""

import torch

from lipscope.cli import main


def test_it_writes_the_weights_once(tmp_path, capsys):
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert main(["to-safetensors", str(tmp_path)]) == 0
    assert capsys.readouterr().out.replace("\n", "").endswith("model.safetensors")
    assert main(["to-safetensors", str(tmp_path)]) == 2
    assert "has model.safetensors already, and no file is replaced" in capsys.readouterr().err


def test_a_directory_without_weights_is_refused(tmp_path, capsys):
    assert main(["to-safetensors", str(tmp_path)]) == 2
    assert "has no pytorch_model.bin" in capsys.readouterr().err
