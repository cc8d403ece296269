"""Every Prometheus metric of every process: the only place for metric names. Units are in the names."""

from __future__ import annotations

import ssl

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from services.config import TLSConfig
from services.errors import ConfigError, InsecureAddressError, PortBusyError
from services.rpc import is_loopback

HEAD_UNITS = Gauge("streamrl_head_units", "Attached DP units")
HEAD_QUEUED = Gauge("streamrl_head_samples_queued", "Samples not yet handed to a unit")
HEAD_RUNNING = Gauge("streamrl_head_samples_running", "Samples handed to units and not finished")
HEAD_DELIVERED = Counter("streamrl_head_samples_delivered_total", "Samples sent to trainer ranks for the first time")
HEAD_REQUEUED = Counter("streamrl_head_samples_requeued_total", "Samples put back in the queue", ["reason"])
HEAD_FAILED = Counter("streamrl_head_samples_failed_total", "Samples given up", ["code"])
HEAD_DUPLICATES = Counter("streamrl_head_samples_duplicate_total", "Second copies dropped")
HEAD_VERSION = Gauge("streamrl_head_weight_version", "Newest published weight version")

UNIT_RUNNING = Gauge("streamrl_unit_samples_running", "Samples being decoded")
UNIT_WAITING = Gauge("streamrl_unit_samples_waiting", "Samples in the unit's queue")
UNIT_TOKENS = Counter("streamrl_unit_tokens_total", "Tokens generated")
UNIT_FINISHED = Counter("streamrl_unit_samples_finished_total", "Samples finished")
UNIT_VERSION = Gauge("streamrl_unit_weight_version", "Committed weight version")
UNIT_STAGE_SECONDS = Histogram("streamrl_unit_weight_stage_seconds", "Fetching and verifying one version")
UNIT_COMMIT_SECONDS = Histogram("streamrl_unit_weight_commit_pause_seconds", "Decode paused for one commit")
UNIT_WEIGHTS_FAILED = Counter("streamrl_unit_weight_failures_total", "Refused versions")

TRAINER_ITERATION = Gauge("streamrl_trainer_iteration", "Finished iterations")
TRAINER_SAMPLES = Counter("streamrl_trainer_samples_total", "Samples by what became of them", ["outcome"])
TRAINER_TOKENS = Counter("streamrl_trainer_tokens_total", "Completion tokens trained on")
TRAINER_REWARD = Gauge("streamrl_trainer_reward_mean", "Mean reward of the last iteration")
TRAINER_ACCURACY = Gauge("streamrl_trainer_accuracy", "Held-out accuracy")
TRAINER_STALENESS = Gauge("streamrl_trainer_staleness_max", "Largest staleness in the last iteration, versions")
TRAINER_LOGPROB_GAP = Gauge("streamrl_trainer_logprob_gap_max", "Largest |engine - trainer| log-prob, on-policy tokens")
TRAINER_ITERATION_SECONDS = Histogram("streamrl_trainer_iteration_seconds", "Wall time of one iteration")
TRAINER_WAIT_SECONDS = Histogram("streamrl_trainer_wait_seconds", "Time per iteration without samples to train on")
TRAINER_TRAIN_SECONDS = Histogram("streamrl_trainer_train_seconds", "Compute time per iteration")
TRAINER_PUBLISH_SECONDS = Histogram("streamrl_trainer_publish_seconds", "From snapshot to all units staged")


def require_safe_metrics(host: str, tls: TLSConfig | None, what: str) -> None:
    """Raise `InsecureAddressError` for plain HTTP beyond loopback: `/metrics` knows no tokens."""
    if tls is None and not is_loopback(host):
        raise InsecureAddressError(
            f"{what}: refusing plain HTTP on {host}: give security.tls, or metrics.host: 127.0.0.1"
        )


def serve_metrics(host: str, port: int, what: str, tls: TLSConfig | None = None) -> int:
    """Serve `/metrics` from a daemon thread, over HTTPS with `tls`; returns the bound port.

    Raises `PortBusyError`, `InsecureAddressError` (nothing but TLS protects it beyond loopback), or `ConfigError`.
    """
    require_safe_metrics(host, tls, what)
    try:
        if tls is None:
            server, _thread = start_http_server(port, addr=host)
        else:
            server, _thread = start_http_server(
                port,
                addr=host,
                certfile=str(tls.cert),
                keyfile=str(tls.key),
                client_cafile=str(tls.ca) if tls.ca else None,
                client_auth_required=tls.ca is not None,
            )
    except ssl.SSLError as error:
        raise ConfigError(f"{what}: security.tls: {error}") from None
    except OSError as error:
        raise PortBusyError(f"{what}: cannot serve metrics on {host}:{port}: {error.strerror}") from None
    return int(server.server_port)
