"""The ids that a policy reads and writes in ToolWorld, and the words behind them.

A position of the policy's input is a *compound token*: up to ``NUM_FIELDS`` ids whose embeddings are summed. Every role
has its own range of ids, so that "needs ``seat``" and "gives ``seat``" are different ids of the same word. The ids that
a policy can write (tools and arguments) come first: ``0 .. NUM_OUTPUTS - 1``.
"""

import enum

TOOLS = 12  # tools per environment, a fixed capacity
RULES = 4  # guarded rules per tool
SYMBOLS = 12  # named facts per environment; slot i of the state holds fact i
HIDDEN = 4  # unnamed slots, seen only through a reading tool
MISTAKE, COMMITTED = SYMBOLS + HIDDEN, SYMBOLS + HIDDEN + 1  # slots that every environment has
SLOTS = SYMBOLS + HIDDEN + 2
VALUES = 3  # a slot holds 0, 1 or 2
MAX_TURNS = 10
STYLES = 32
VISIBLE = 4  # facts of the initial state that the prompt tells
NUM_FIELDS = 6
PROMPT_LENGTH = TOOLS + 1 + VISIBLE + 1


class Op(enum.IntEnum):
    """Abstract role of a tool."""

    CALL = 0
    READ = 1
    ACT = 2
    CONFIRM = 3
    COMMIT = 4
    UNDO = 5
    JOIN = 6
    SUBMIT = 7


class Code(enum.IntEnum):
    """What a tool call answers."""

    START = 0
    OK = 1
    ERROR = 2
    BROKEN = 3


class RewardKind(enum.IntEnum):
    """How the verifier's checks become a reward."""

    BINARY = 0
    PARTIAL = 1
    PENALTY = 2


# Twelve facts per domain, in the order in which a chain of work usually goes through them.
LEXICON: dict[str, tuple[str, ...]] = {
    "travel": (
        "search",
        "quote",
        "seat",
        "fare",
        "hold",
        "ticket",
        "visa",
        "hotel",
        "car",
        "insurance",
        "review",
        "refund",
    ),
    "files": (
        "mount",
        "listing",
        "folder",
        "draft",
        "merge",
        "archive",
        "backup",
        "index",
        "share",
        "tag",
        "lock",
        "trash",
    ),
    "trading": (
        "login",
        "watch",
        "quote",
        "limit",
        "order",
        "fill",
        "report",
        "alert",
        "hedge",
        "margin",
        "audit",
        "close",
    ),
    "retail": (
        "account",
        "cart",
        "coupon",
        "address",
        "payment",
        "parcel",
        "invoice",
        "wish",
        "gift",
        "points",
        "check",
        "return",
    ),
    "vehicle": (
        "unlock",
        "belt",
        "engine",
        "gear",
        "route",
        "cruise",
        "lights",
        "tyre",
        "fuel",
        "climate",
        "brake",
        "park",
    ),
    "tickets": (
        "intake",
        "triage",
        "owner",
        "repro",
        "patch",
        "verify",
        "label",
        "note",
        "sla",
        "survey",
        "hold",
        "reopen",
    ),
    "database": (
        "connect",
        "schema",
        "table",
        "rows",
        "join",
        "view",
        "dump",
        "cache",
        "grant",
        "trigger",
        "plan",
        "rollback",
    ),
    "messages": (
        "contact",
        "thread",
        "reply",
        "attach",
        "sign",
        "send",
        "pin",
        "mute",
        "star",
        "translate",
        "preview",
        "recall",
    ),
}
DOMAINS = tuple(LEXICON)


def _ranges() -> tuple[dict[str, int], int]:
    """Lays the id ranges end to end; returns the first id of each and the size of the vocabulary."""
    sizes = {
        "pad": 1,
        "tool": TOOLS,
        "argument": 1 + VALUES,
        "op": len(Op),
        "card_value": VALUES,
        "value": VALUES,
        "code": len(Code),
        "reward": len(RewardKind),
        "budget": MAX_TURNS + 1,
        "style": STYLES,
    }
    sizes |= {f"{role}_symbol": len(DOMAINS) * SYMBOLS for role in ("need", "give", "goal", "state", "result")}
    starts, total = {}, 0
    for name, size in sizes.items():
        starts[name], total = total, total + size
    return starts, total


FIRST, VOCAB_SIZE = _ranges()
NUM_OUTPUTS = FIRST["op"]
NO_ARGUMENT = FIRST["argument"]  # argument v is NO_ARGUMENT + 1 + v


def symbol(role: str, domain: int, slot: int) -> int:
    """Id of fact ``slot`` of ``domain`` in a role: need, give, goal, state or result."""
    return FIRST[f"{role}_symbol"] + domain * SYMBOLS + slot
