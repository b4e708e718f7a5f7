# Not built yet: written from the package's own declarations and checked by reading alone.
# docker build -t octavo . && docker run --gpus=all -p 8000:8000 -v /models:/models:ro \
#     -e OCTAVO_API_KEY octavo --model=/models/my-model --host=0.0.0.0
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/octavo \
    && /opt/octavo/bin/pip install --no-cache-dir -c constraints.txt ".[serve,cuda13,tracing]"

FROM python:3.12.11-slim-bookworm
RUN useradd --create-home --uid 10001 octavo
COPY --from=build /opt/octavo /opt/octavo
USER octavo
WORKDIR /home/octavo
# Compiled programs are kept here; a volume lets the next container start without compiling.
RUN mkdir -p /home/octavo/.cache
VOLUME /home/octavo/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
    CMD ["/opt/octavo/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=2)"]
ENTRYPOINT ["/opt/octavo/bin/octavo", "serve"]
