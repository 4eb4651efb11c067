"""A language model learns from conversations with host environments: what `qwen3_8b_paper` and the others share.

Presets: `default` (all parameters learn), `lora` (adapters do).
"""

from ml_collections import ConfigDict, config_dict


def get_config(preset: str = "default") -> ConfigDict:
    """Returns the configuration of `experiments.agent` and `experiments.evaluate`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("default", "lora"):
        raise ValueError(f"unknown preset {preset!r}; there are: default, lora")
    config = ConfigDict()
    config.seed = 0
    config.model = config_dict.placeholder(str)  # folder of safetensors, or a GGUF file
    config.preset = "qwen3_0_6b"  # its dimensions, for `experiments.memory`
    config.memory_layers = ()  # two numbers of layers that `experiments.memory` compiles in place of all; () takes all
    config.dtype = "bfloat16"
    config.mesh = ConfigDict({"data": 1, "model": 1})
    config.scheduler = ConfigDict({"name": "envsched"}, convert_dict=False)
    config.environment = environment("bfcl", "train")

    config.chat = ConfigDict()
    config.chat.style = "hermes"
    config.chat.brief = False
    config.chat.example = False
    config.chat.more = ConfigDict({"enable_thinking": False})

    config.limits = ConfigDict({"context": 16384, "answer": 1024, "answers": 20, "result": 4000})
    config.engine = ConfigDict({"slots": 32, "chunk": 32, "piece": 512, "ahead": 8, "capacity": 2048})

    config.reward = ConfigDict({"kind": "progress", "format": 0.0})

    config.train = ConfigDict()
    config.train.steps = 40
    config.train.batch_size = 16
    config.train.group_size = 8
    config.train.temperature = 1.0
    config.train.advantage_std = "group"
    config.train.clip_low = 0.2
    config.train.clip_high = 0.2
    config.train.part = 1  # groups in one pass of the update; a multiple of mesh.data
    config.train.remat = True
    config.train.lora_rank = 0  # 0 trains every parameter
    config.train.lora_scale = 2.0
    config.train.checkpoint_every = 1  # steps; what a run that is killed does again
    config.train.save_every = 10  # steps between two writings of the weights, besides the last

    config.optimizer = ConfigDict()
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 1e-6
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-8
    config.optimizer.max_norm = 1.0

    if preset == "lora":
        config.train.lora_rank = 32
        config.optimizer.learning_rate = 5e-5

    config.evaluation = ConfigDict()
    config.evaluation.suites = ("bfcl",)  # sections of `suites`
    config.evaluation.repeats = 4
    config.evaluation.temperature = 0.7
    config.evaluation.most = 0  # tasks of a suite, drawn once by the seed; 0 takes all
    config.suites = ConfigDict({name: environment(name, "all") for name in ("taubench", "acebench")})
    config.suites.bfcl = environment("bfcl", "held_out")
    return config


def environment(name: str, share: str) -> ConfigDict:
    """Returns the section of one benchmark: 'all' its tasks, those to 'train' on, or the scenarios 'held_out'."""
    section = ConfigDict({"name": name, "tasks": (), "share": share, "held_out": 0.2, "limit_s": 10.0})
    if name == "bfcl":
        section.categories = ("base", "miss_func", "miss_param", "long_context")
        return section
    section.checkout = config_dict.placeholder(str)  # folder of a clone
    section.user = ConfigDict({"url": "", "model": "", "key_name": ""})  # without url, it says all at once
    section.limit_s = 120.0  # a served user answers within a request
    if name == "taubench":
        section.domains, section.split = ("retail", "airline"), "test"
    else:
        section.kinds, section.language = ("multi_step", "multi_turn"), "en"
    return section
