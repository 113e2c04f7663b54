"""Evaluation: tasks whose answers are known, and what runs methods on them."""
