"""Settings: one frozen dataclass a service, read once from flags, environment and a YAML file; wrong values stop the start.

A field `table_bytes_max` is the flag `--table-bytes-max`, the variable `TREADLE_<AREA>_TABLE_BYTES_MAX` and the YAML key
`table_bytes_max` of `--config FILE`; in that order of precedence. The string under a field is its help text.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from treadle.contract.errors import TreadleError

SettingsType = TypeVar("SettingsType")
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


class WrongSetting(TreadleError):
    """A setting is unknown, has a wrong value, or does not go with another; the message is one line."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What every service has. Services inherit, override the ports and add their own."""

    KEY_FILES: ClassVar[tuple[str, ...]] = ("api_key_file",)  # settings that make every caller show a key

    listen: str = "127.0.0.1:0"
    """Address to listen on, host:port; port 0 takes a free one."""
    metrics_listen: str = "127.0.0.1:0"
    """Address of /metrics, host:port; port 0 takes a free one."""
    metrics_public: bool = False
    """Allow /metrics, which knows no keys, beyond loopback."""
    api_key_file: Path | None = None
    """File with the keys that callers may show, one a line. Needed beyond loopback unless clients show certificates."""
    tls_cert_file: Path | None = None
    """PEM certificate chain of this service; with tls_key_file."""
    tls_key_file: Path | None = None
    """PEM private key of this service; with tls_cert_file."""
    tls_client_root_file: Path | None = None
    """PEM roots that vouch for callers: each shows a certificate of theirs, probes too. With tls_cert_file."""
    drain_seconds: float = 10.0
    """Longest time for calls in progress to end after SIGTERM."""
    drain_grace_seconds: float = 0.0
    """So long of that the service says that it stops and still takes what comes late."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "text"
    """text or json."""
    otlp_endpoint: str = ""
    """URL of an OTLP/HTTP collector for spans, e.g. http://127.0.0.1:4318/v1/traces; needs the extra `tracing`. None: no spans."""
    calls_max: int = 1024
    """Most calls in progress at once; more are refused with RESOURCE_EXHAUSTED."""

    def __post_init__(self) -> None:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise WrongSetting("tls_cert_file and tls_key_file go together")
        if self.tls_client_root_file is not None and self.tls_cert_file is None:
            raise WrongSetting("tls_client_root_file needs tls_cert_file and tls_key_file: certificates are asked for in TLS")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise WrongSetting(f"log_level: debug, info, warning or error, got {self.log_level!r}")
        if self.log_format not in ("text", "json"):
            raise WrongSetting(f"log_format: text or json, got {self.log_format!r}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise WrongSetting(f"otlp_endpoint: a URL, http:// or https://, got {self.otlp_endpoint!r}")
        if self.drain_seconds < 0 or self.drain_grace_seconds < 0 or self.calls_max < 1:
            raise WrongSetting("drain_seconds and drain_grace_seconds are >= 0 and calls_max >= 1")
        self.check_callers("listen", self.listen, by_certificate=self.tls_client_root_file is not None)
        metrics_host, _ = split_address(self.metrics_listen)
        if not is_loopback(metrics_host) and not self.metrics_public:
            raise WrongSetting(
                f"metrics_listen: {self.metrics_listen} is beyond loopback and knows no keys; set metrics_public to allow it"
            )

    def check_callers(self, setting: str, address: str, *, by_certificate: bool) -> None:
        """Raise WrongSetting for an address beyond loopback, host:port, where anybody may call.

        by_certificate: who listens there knows callers by certificates; TLS without these hides what is said, from nobody who calls
        """
        host, _ = split_address(address)
        if is_loopback(host) or by_certificate or any(getattr(self, name) is not None for name in self.KEY_FILES):
            return
        ways = [*self.KEY_FILES, *(["tls_client_root_file"] if setting == "listen" else [])]
        raise WrongSetting(f"{setting}: {address} is beyond loopback; give {' or '.join(ways)}, or listen on 127.0.0.1")


def split_address(address: str) -> tuple[str, int]:
    """`host:port` as its parts. Raises WrongSetting for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise WrongSetting(f"an address is host:port with a port up to 65535, got {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True for `localhost` and for numbers of this machine alone; of other names nobody knows where they lead."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(cls: type[SettingsType], area: str, program: str, argv: Sequence[str] | None = None) -> SettingsType:
    """Settings of the class `cls` from flags, `TREADLE_<area>_*` and --config. A wrong value prints one line and exits with 2."""
    parser = _parser(cls, area, program)
    flags = vars(parser.parse_args(argv))
    try:
        config = _read_yaml(flags.pop("config"))
        return _merge(cls, area, flags, config)
    except (TreadleError, OSError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(2)


def _parser(cls: type[Any], area: str, program: str) -> argparse.ArgumentParser:
    helps = _field_docs(cls)
    parser = argparse.ArgumentParser(prog=program, description=(cls.__doc__ or "").splitlines()[0])
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings by name")
    for field in fields(cls):
        flag = "--" + field.name.replace("_", "-")
        text = f"{helps.get(field.name, '')} [TREADLE_{area}_{field.name.upper()}; default: {field.default}]".strip()
        parser.add_argument(flag, dest=field.name, default=MISSING, metavar="VALUE", help=text.replace("%", "%%"))
    return parser


def _merge(cls: type[SettingsType], area: str, flags: Mapping[str, Any], config: Mapping[str, Any]) -> SettingsType:
    known: dict[str, Field[Any]] = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise WrongSetting(f"config: unknown settings {unknown}; known are {sorted(known)}")
    hints, values = get_type_hints(cls), {}
    for name in known:
        variable = f"TREADLE_{area}_{name.upper()}"
        if flags[name] is not MISSING:
            values[name] = _convert("--" + name.replace("_", "-"), hints[name], flags[name])
        elif variable in os.environ:
            values[name] = _convert(variable, hints[name], os.environ[variable])
        elif name in config:
            values[name] = _convert(f"config {name}", hints[name], config[name])
    return cls(**values)


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise WrongSetting(f"config {path}: not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise WrongSetting(f"config {path}: settings by name expected, got {type(loaded).__name__}")
    return loaded


def _convert(source: str, hint: Any, value: Any) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if type(None) in options and value in (None, "", "none"):
        return None
    kind = next(option for option in options if option is not type(None))
    text = str(value).strip()
    try:
        if kind is bool:
            return _to_bool(text)
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return float(text)
        return kind(text)
    except ValueError as error:
        names = (
            f"one of {[str(item.value) for item in kind]}" if isinstance(kind, type) and issubclass(kind, Enum) else kind.__name__
        )
        raise WrongSetting(f"{source}: {names} expected, got {value!r}") from error


def _to_bool(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(text)


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Docstrings under the fields of `cls` and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    docs[before.target.id] = " ".join(after.value.value.split())
    return docs
