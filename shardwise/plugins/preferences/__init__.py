"""Objectives on preferences: pairs of a chosen and a rejected answer, answers with a label, and reward models.

Each objective is one file with its loss; ``documents.py`` computes the log-probabilities that all of them share.
"""
