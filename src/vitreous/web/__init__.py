"""The web page of ``vitreous serve``.

``server`` starts it, ``layout`` declares the components, ``tabs`` handles their events, ``image_service`` and
``text_service`` compute explanations without knowing Gradio, ``security`` filters requests.
"""
