"""Methods as tests ask for them: all ten, and those that read everything."""

EXACT = ["full", "cpu-dense", "kv-stream"]
AT_100 = ["topk:100%", "oracle:100%", "quest:5:100%", "h2o:100%", "loki:25%:100%"]
SPECS = [
    *EXACT,
    "lsh:4:20:exact_below=16",
    "topk:20%",
    "oracle:20%",
    "quest:4:20%",
    "h2o:30%",
    "loki:25%:20%",
    "streaming",
]
