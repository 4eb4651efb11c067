"""Text to ids and back, from a model's own files; chats by the model's own template. No torch, no download."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envsched_jax.policy.load import ModelError, field, open_gguf

CONTROL = 3  # the type of a token, in GGUF files, that no text turns into


class Tokenizer(NamedTuple):
    """A tokenizer and what a chat looks like.

    Attributes:
      encoder: a ``tokenizers.Tokenizer``.
      eos: ids that end a turn.
      template: Jinja source of a chat; None where the model has none.
      special: tokens that templates name, such as ``bos_token``.
    """

    encoder: Any
    eos: tuple[int, ...]
    template: str | None
    special: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens in it count as such, and none is added."""
        return self.encoder.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of ids, with special tokens if asked for."""
        return self.encoder.decode(list(ids), skip_special_tokens=not special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer: bool = True,
        **more: Any,
    ) -> str:
        """Returns a conversation as the model was trained to see it.

        Args:
          messages: each with ``role`` and ``content``, and whatever else the template reads.
          tools: JSON schemas of functions.
          answer: whether the model speaks next.
          **more: what else the template reads, such as ``enable_thinking``.

        Raises:
          ModelError: there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise ModelError("this model has no chat template")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = _json
        try:
            return environment.from_string(self.template).render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=answer, **self.special, **more
            )
        except jinja2.TemplateError as error:
            raise ModelError(f"chat template: {error}") from error


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of a model.

    Args:
      path: a folder with ``tokenizer.json`` (and ``tokenizer_config.json``, ``generation_config.json``,
        ``chat_template.jinja`` where there are such), or a GGUF file of SmolLM2.

    Raises:
      ModelError: a file is missing or of a kind that is not known.
    """
    source = Path(path)
    if source.is_file():
        return _from_gguf(source)
    from tokenizers import Tokenizer as Encoder

    try:
        encoder = Encoder.from_file(str(source / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{source / 'tokenizer.json'}: cannot be read: {error}") from None
    fields = _read(source / "tokenizer_config.json")
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = fields.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            special[name] = token
    ends = _read(source / "generation_config.json").get("eos_token_id", [])
    eos = {int(i) for i in (ends if isinstance(ends, list) else [ends])}
    last = encoder.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if last is not None:
        eos.add(last)
    aside = source / "chat_template.jinja"
    template = aside.read_text() if aside.exists() else fields.get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return Tokenizer(encoder, tuple(sorted(eos)), template, special)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path}: expected a JSON file: {error}") from None


def _json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _from_gguf(path: Path) -> Tokenizer:
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder
    from tokenizers.decoders import ByteLevel

    reader, where = open_gguf(path), str(path)
    kinds = tuple(field(reader, f"tokenizer.ggml.{name}", where) for name in ("model", "pre"))
    if kinds != ("gpt2", "smollm"):
        raise ModelError(f"{where}: a tokenizer of kind {kinds}: expected ('gpt2', 'smollm'): use its tokenizer.json")
    tokens, types = (field(reader, f"tokenizer.ggml.{name}", where) for name in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges", where)]
    encoder = Encoder(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    encoder.decoder = ByteLevel()
    marked = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in marked])
    special, eos = {}, set()
    for name in ("bos", "eos", "padding", "unknown"):
        found = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        if found is not None:
            special[{"padding": "pad", "unknown": "unk"}.get(name, name) + "_token"] = tokens[found.contents()]
            eos |= {found.contents()} if name == "eos" else set()
    template = reader.fields.get("tokenizer.chat_template")
    return Tokenizer(encoder, tuple(sorted(eos)), None if template is None else template.contents(), special)
