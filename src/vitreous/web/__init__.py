"""The web page: what it shows is worked out here without a browser; ``layout`` alone knows Gradio."""
