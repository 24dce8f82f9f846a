"""Validate manifests of Kubernetes against the schemas in custom resource definitions.

python manifests.py CRD.yaml... -- MANIFEST.yaml...    as the operators' repositories have the former
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml


def schemas(definitions: Iterable[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """(apiVersion, kind) -> its schema, which refuses fields that it does not know."""
    found = {}
    for path in definitions:
        for one in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            spec = one["spec"]
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                schema["properties"]["metadata"] = {"type": "object"}
                name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                found[name] = _closed(schema)
    return found


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with no other fields allowed than the named ones, and Kubernetes' own words in JSON schema's."""
    if schema.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    for part in [*schema.get("properties", {}).items()]:
        schema["properties"][part[0]] = _closed(part[1])
    if isinstance(schema.get("items"), dict):
        schema["items"] = _closed(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = _closed(schema["additionalProperties"])
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


def problems(manifests: Iterable[Path], known: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """What the schemas refuse, and what they are not asked about."""
    for path in manifests:
        for one in yaml.safe_load_all(path.read_text()):
            name = one["apiVersion"], one["kind"]
            if name not in known:
                yield f"{path.name}: {'/'.join(name)}: no schema"
                continue
            for error in jsonschema.Draft202012Validator(known[name]).iter_errors(one):
                yield f"{path.name}: {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


if __name__ == "__main__":
    at = sys.argv.index("--")
    found = list(problems(map(Path, sys.argv[at + 1 :]), schemas(map(Path, sys.argv[1:at]))))
    print("\n".join(found) or "all valid")
    sys.exit(bool(found))
