"""Attention through block tables: `gather` is what runs, `reference` is what it is tested against."""
