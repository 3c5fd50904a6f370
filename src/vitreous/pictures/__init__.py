"""Pictures of explanations: overlays, figures and their numbers; none of them touches pyplot or other global state."""
