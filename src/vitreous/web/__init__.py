"""The web page of ``vitreous serve``.

``server`` starts it, ``layout`` declares the components, ``image_tab`` and ``text_tab`` handle their events,
``image_service`` computes explanations independently of Gradio, ``jobs`` runs models, ``security`` filters requests.
"""
