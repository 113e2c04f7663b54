"""Samples of an evaluation that are made up."""

SETTINGS = {"model": "smollm2", "seed": 0, "dense_layers": (0, 16), "window": {"sinks": 16}}
PNG = b"\x89PNG\r\n\x1a\n"


def record(task="vt", length=4096, protocol="easy", index=0, method="full", score=1.0, **fields):
    cost = {"steps": 10, "rows": 200, "tokens": 1000, "row_bytes": 4e6, "search_bytes": 1e6}
    return {
        "task": task,
        "length": length,
        "protocol": protocol,
        "index": index,
        "method": method,
        "score": score,
        "output": "a <b> & c",
        "answers": ["a"],
        "prompt_tokens": length - 96,
        "new_tokens": 10,
        "cost": {**cost, "search_ops": 2e6},
        **fields,
    }


def many(tasks=("vt", "cwe"), lengths=(4096, 8192), methods=("full", "lsh:10:150", "streaming")):
    return [
        record(task, length, protocol, index, method, score=(index + len(method)) % 3 / 2)
        for task in tasks
        for length in lengths
        for protocol in ("easy", "hard")
        for index in range(4)
        for method in methods
    ]
