"""Models that run through block tables: any Hugging Face decoder, and the demo model."""
