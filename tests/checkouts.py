"""Tiny invented benchmarks in the layout of the real ones: a bicycle rental, and a phone with an alarm clock."""

import json
import textwrap

_RENTAL = {
    "tau_bench/__init__.py": "from tau_bench.envs import user\n",
    "tau_bench/types.py": "import a_package_that_nobody_has\n",
    "tau_bench/envs/__init__.py": "from tau_bench.envs import user\n",
    "tau_bench/envs/user.py": "import a_client_that_nobody_has\n",
    "tau_bench/envs/tool.py": """
        class Tool:
            @staticmethod
            def invoke(*args, **kwargs):
                raise RuntimeError("abstract")
    """,
    "tau_bench/envs/retail/__init__.py": "from tau_bench.envs import user\n",
    "tau_bench/envs/retail/wiki.md": "# Rental\nLend only free bicycles, and name the price.\n",
    "tau_bench/envs/retail/data/__init__.py": """
        import json
        from pathlib import Path

        def load_data():
            names = ("bikes", "riders")
            return {name: json.loads(Path(__file__).with_name(f"{name}.json").read_text()) for name in names}
    """,
    "tau_bench/envs/retail/data/bikes.json": json.dumps({"b1": {"free": True, "price": 1200, "notes": []}}),
    "tau_bench/envs/retail/data/riders.json": json.dumps({"ann": {"bikes": []}}),
    "tau_bench/envs/retail/tools/__init__.py": """
        from .hand_over import HandOver
        from .lend_bike import LendBike
        from .show_bike import ShowBike

        ALL_TOOLS = [HandOver, LendBike, ShowBike]
    """,
    "tau_bench/envs/retail/tools/show_bike.py": """
        import json
        from tau_bench.envs.tool import Tool

        class ShowBike(Tool):
            @staticmethod
            def invoke(data, bike):
                return json.dumps(data["bikes"][bike])

            @staticmethod
            def get_info():
                parameters = {"type": "object", "properties": {"bike": {"type": "string"}}, "required": ["bike"]}
                about = {"name": "show_bike", "description": "Shows a bicycle.", "parameters": parameters}
                return {"type": "function", "function": about}
    """,
    "tau_bench/envs/retail/tools/lend_bike.py": """
        from tau_bench.envs.tool import Tool

        class LendBike(Tool):
            @staticmethod
            def invoke(data, bike, rider, notes):
                if not data["bikes"][bike]["free"]:
                    return "Error: not free"
                data["bikes"][bike].update(free=False, notes=notes)
                notes.append("lent")  # changes the argument, which is now part of the data
                data["riders"][rider]["bikes"].append(bike)
                return "lent"

            @staticmethod
            def get_info():
                properties = {"bike": {"type": "string"}, "rider": {"type": "string"}, "notes": {"type": "array"}}
                parameters = {"type": "object", "properties": properties, "required": list(properties)}
                about = {"name": "lend_bike", "description": "Lends a bicycle.", "parameters": parameters}
                return {"type": "function", "function": about}
    """,
    "tau_bench/envs/retail/tools/hand_over.py": """
        from tau_bench.envs.tool import Tool

        class HandOver(Tool):
            @staticmethod
            def invoke(data):
                return "handed over"

            @staticmethod
            def get_info():
                about = {"name": "transfer_to_human_agents", "description": "Ends.", "parameters": {"type": "object"}}
                return {"type": "function", "function": about}
    """,
    "tau_bench/envs/retail/tasks_test.py": """
        from tau_bench.types import Action, Task

        LEND = Action(name="lend_bike", kwargs={"bike": "b1", "rider": "ann", "notes": ["bell"]})
        TASKS_TEST = [
            Task(annotator="0", user_id="ann", instruction="You are Ann and want b1 and its price.",
                 actions=[Action(name="show_bike", kwargs={"bike": "b1"}), LEND], outputs=["1200"]),
            Task(annotator="0", user_id="ann", instruction="You want to talk to a person.",
                 actions=[Action(name="transfer_to_human_agents", kwargs={})], outputs=[]),
        ]
    """,
    "tau_bench/envs/retail/tasks_dev.py": """
        from tau_bench.types import Action, Task

        TASKS_DEV = [Task(user_id="ann", instruction="You want nothing.", actions=[], outputs=[])]
    """,
}

_CLOCK_TOOLS = [
    {"name": "switch_on", "description": "Switches on.", "parameters": {"type": "dict", "properties": {}}},
    {
        "name": "add_alarm",
        "description": "Adds alarms.",
        "parameters": {
            "type": "dict",
            "required": ["hour", "days"],
            "properties": {"hour": {"type": "float"}, "days": {"type": "list", "items": {"type": "dict"}}},
        },
    },
    {"name": "ring", "description": "No class has it.", "parameters": {"type": "dict", "properties": {}}},
]
_CLOCK_END = [{"BaseApi": {"on": True}}, {"ClockApi": {"alarms": {"1": {"hour": 7, "days": [{"day": "Ann's"}]}}}}]


def _clock_rows(kind, question, stones):
    start = {"initial_config": {"BaseApi": {"on": False}}, "involved_classes": ["BaseApi", "ClockApi"]}
    rows, answers = [], []
    for number, ways in enumerate(stones):
        name = f"agent_{kind}_{number}"
        rows.append({"id": name, "question": question, **start, "function": _CLOCK_TOOLS})
        answers.append({"id": name, "ground_truth": _CLOCK_END, "mile_stone": ways})
    return {
        f"data_all/data_en/data_agent_{kind}.json": "\n".join(map(json.dumps, rows)),
        f"data_all/data_en/possible_answer/data_agent_{kind}.json": "\n".join(map(json.dumps, answers)),
    }


_STONES = ["[switch_on()]", '[add_alarm(hour=7, days=[{"day": "Ann\'s"}])] ']
_BOTH = '[switch_on(), add_alarm(hour=7, days=[{"day": "Ann\'s"}])]'
_CLOCK = {
    "model_inference/__init__.py": "import a_client_that_nobody_has\n",
    "model_inference/multi_turn/__init__.py": "import a_client_that_nobody_has\n",
    "model_inference/apimodel_inference.py": """
        import a_client_that_nobody_has

        SAVED_CLASS = {"BaseApi": ["on"], "ClockApi": ["alarms"]}
    """,
    "model_inference/prompt_en.py": 'TRAVEL_PROMPT_EN = "Travel."\nBASE_PROMPT_EN = "It is June. Ask for the hour."\n',
    "model_inference/multi_turn/scenariosen/base_api.py": """
        class BaseApi:
            def __init__(self):
                self.on = False

            def _load_scenario(self, scenario, long_context=False):
                self.on = scenario.get("on", False)

            def switch_on(self):
                self.on = True
                return {"status": True}
    """,
    **_clock_rows("multi_step", "Set an alarm.", [_STONES, [["[ring()]"], _STONES], ["[ring(x='Ann's')]"]]),
    **_clock_rows("multi_turn", "You want an alarm at 7.", [[_BOTH]]),
}
for _kind in ("multi_step", "multi_turn"):
    _CLOCK[f"model_inference/{_kind}/{_kind}_utils.py"] = f"""
        CLASS_FILE_PATH_MAPPING_EN = {{
            "BaseApi": "model_inference.multi_turn.scenariosen.base_api",
            "ClockApi": "model_inference.{_kind}.scenariosen.clock",
        }}
    """
    _CLOCK[f"model_inference/{_kind}/scenariosen/clock.py"] = """
        from model_inference.multi_turn.scenariosen.base_api import BaseApi

        class ClockApi(BaseApi):
            def __init__(self):
                self.alarms = {}
                self.history = object()  # is not checked

            def add_alarm(self, hour, days):
                if not self.on:
                    return {"status": False, "message": "switched off"}
                self.alarms[len(self.alarms) + 1] = {"hour": hour, "days": days}
                return f"{len(self.alarms)} set"

            def secret(self):
                return "not described"
    """


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder


def rental(folder):
    """Writes a checkout of tau-bench's layout: two tasks and one more of another split; returns the folder."""
    return write(folder, _RENTAL)


def clock(folder):
    """Writes a checkout of ACEBench's layout: three tasks of multi_step, one of multi_turn; returns the folder."""
    return write(folder, _CLOCK)
