"""Methods as tests ask for them: all eleven, and those that read everything."""

EXACT = ["full", "cpu-dense", "kv-stream"]
AT_100 = ["topk:100%", "oracle:100%", "quest:5:100%", "h2o:100%", "loki:25%:100%"]
AT_100 += ["scan:2:100%:exact_below=0"]
SPECS = [
    *EXACT,
    "lsh:4:20:exact_below=16",
    "scan:2:20%:min_rows=4:exact_below=16",
    "topk:20%",
    "oracle:20%",
    "quest:4:20%",
    "h2o:30%",
    "loki:25%:20%",
    "streaming",
]
