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


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder


def rental(folder):
    """Writes a checkout of tau-bench's layout: two tasks and one more of another split; returns the folder."""
    return write(folder, _RENTAL)
