"""A model's attention on real text: what sampling rests on, what it costs, where it fails.

`study.analyze` measures, `findings` puts it in words, `report.write` makes files of it.
"""
