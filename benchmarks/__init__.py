"""Speeds against rivals, one suite per operator; ``moe-zero bench`` runs them and writes one report."""
