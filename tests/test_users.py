"""Users: scripts say their lines; a served one asks its endpoint, tries again where that helps, and fails by name."""

import functools
import json
import pickle
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envsched_jax.environments import users
from envsched_jax.environments.conversation import ConversationError
from envsched_jax.environments.users import STOPS, ScriptedUser, ServedUser


def test_a_script_is_said_line_by_line():
    user = ScriptedUser(["hello", "yes"])
    for _ in range(2):  # an opening begins anew
        assert user.opening() == "hello"
        assert user.answer("sure?") == "yes"
        assert [users.stops(user.answer("and now?")) for _ in range(2)] == [True, True]
    assert not users.stops("hello") and all(users.stops(f"well, {stop}") for stop in STOPS)
    assert users.plain("all of it").opening() == "all of it"
    for nothing in ([], "hello"):
        with pytest.raises(ValueError, match="sequence of at least one line"):
            ScriptedUser(nothing)


class Handler(BaseHTTPRequestHandler):
    """Answers with what is next in the server's list: a status and a text, or seconds to wait."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        status, text = self.server.answers.pop(0)
        if status == "wait":
            time.sleep(text)
            return
        if status == "hang up":
            self.connection.close()
            return
        if status == 200 and not text.startswith("{"):
            text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.seen, server.answers = True, [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.make = functools.partial(
        ServedUser, f"http://127.0.0.1:{server.server_port}/v1/", "small", timeout=5.0, backoff=0.01
    )
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_served_user_sends_the_whole_talk(served, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_TEST", "abc")
    user = pickle.loads(pickle.dumps(served.make("Return the lamp.", key_name="KEY_OF_A_TEST", temperature=0.5)))
    served.answers += [(200, "I want to return a lamp."), (200, "<think>so so</think>\nOrder 7."), (200, STOPS[0])]
    assert user.opening() == "I want to return a lamp."
    assert user.answer("Which order?") == "Order 7."
    assert users.stops(user.answer("Done."))
    paths, keys, bodies = zip(*served.seen, strict=True)
    assert set(paths) == {"/v1/chat/completions"} and set(keys) == {"Bearer abc"}
    assert bodies[-1]["model"] == "small" and bodies[-1]["temperature"] == 0.5
    messages = bodies[-1]["messages"]
    assert "Return the lamp." in messages[0]["content"] and STOPS[0] in messages[0]["content"]
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert [m["content"] for m in messages[2:]] == ["I want to return a lamp.", "Which order?", "Order 7.", "Done."]
    assert "abc" not in pickle.dumps(user).decode("latin-1")


def test_what_may_pass_is_tried_again(served):
    served.answers += [(503, "busy"), ("hang up", ""), (200, "Hello.")]
    assert served.make("x").opening() == "Hello."
    assert len(served.seen) == 3


@pytest.mark.parametrize(
    ("answers", "sent", "status", "message"),
    [
        ([(429, "slow down")] * 3, 3, "env_error", "HTTP 429: slow down"),
        ([(404, "no such model")], 1, "env_error", "HTTP 404: no such model"),
        ([(200, '{"choices": []}')], 1, "env_error", "expected choices"),
        ([(200, "{not JSON")], 1, "env_error", "expected choices"),
        ([(200, "<think>only thought</think>")], 1, "env_error", "expected choices"),
        ([("wait", 0.5)] * 2, 2, "env_timeout", "no answer within 0.1 s"),
    ],
)
def test_a_failure_says_what_it_is(served, answers, sent, status, message):
    served.answers += answers
    settings = {"timeout": 0.1, "tries": 2} if status == "env_timeout" else {}
    with pytest.raises(ConversationError, match=message) as error:
        served.make("x", **settings).opening()
    assert error.value.status == status and len(served.seen) == sent


def test_settings_are_checked(monkeypatch):
    monkeypatch.delenv("KEY_OF_A_TEST", raising=False)
    with pytest.raises(ConversationError, match="KEY_OF_A_TEST is not set"):
        ServedUser("http://127.0.0.1:9/v1", "m", "x", key_name="KEY_OF_A_TEST").opening()
    with pytest.raises(ConversationError, match="user at http://127"):  # nothing listens there
        ServedUser("http://127.0.0.1:9/v1", "m", "x", backoff=0.0).opening()
    with pytest.raises(ValueError, match="expected http"):
        ServedUser("file:///etc", "m", "x")
    with pytest.raises(ValueError, match="at least 1"):
        ServedUser("http://127.0.0.1:9/v1", "m", "x", tries=0)


PAGE = Path(__file__).resolve().parents[1] / "docs/environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_of_the_page_run(number, tmp_path):
    script = tmp_path / "block.py"  # a file, since worker processes import the script they came from
    script.write_text(BLOCKS[number])
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
