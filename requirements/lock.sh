#!/bin/sh
# One resolution for Python 3.11.0 to 3.14 and all platforms, with hashes, written in parts: a file for each command of the
# Makefile, so that no tool can stop a command that does without it. Call it as `make lock` (`make lock UPGRADE=--upgrade`).
set -eu
cd "$(dirname "$0")/.."
uv=$1
shift
compile() { "$uv" pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-header --no-annotate "$@"; }
mkdir -p build/lock
whole=build/lock/all.txt
cat requirements/*.txt >"$whole"  # what is pinned stays, where it still can
compile pyproject.toml --all-extras --group dev -c requirements/torch.txt -o "$whole" "$@"
# torch's own builds bring these: they are installed with it, never from the locked files
apart=$(sed -n -E 's/^(torch|triton|cuda-[a-z-]*|nvidia-[a-z0-9-]*)==.*/--no-emit-package \1/p' "$whole")
part() {
  name=$1
  shift
  # shellcheck disable=SC2086
  compile pyproject.toml --group build "$@" -c "$whole" --generate-hashes $apart -o "requirements/$name.txt.new"
  mv "requirements/$name.txt.new" "requirements/$name.txt"
}
# Key server and shuffler: no torch
compile deploy/services.txt --group build -c "$whole" --generate-hashes -o requirements/services.txt.new
mv requirements/services.txt.new requirements/services.txt
part run
part test --extra services --extra audit --extra data --extra flower --group test
part simulation --extra flower --group simulation
part lint --extra services --extra audit --extra data --extra flower --group lint
part docs --group docs
part browser --group browser
