"""Order certificates: what a snapshot holds, by hashes that anyone can compute again: `docs/design/certificates.md`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from mqlayer.errors import InvalidInput

FORMAT: Final = 1
BLOCK_RECORDS: Final = 256
BLOCK_BOUNDS: Final = (16, 65_536)
COUNTS: Final = ("inversions", "gaps", "duplicates", "misplaced")
HINT: Final = "make it anew: mqlayer analytics certify --snapshot NAME --out FILE"


class ChainKey(NamedTuple):
    """A chain: a source's records of an LP."""

    topic: str
    source: int
    lp: int


class Block(NamedTuple):
    """Records of a day and range of seqs."""

    first_seq: int
    last_seq: int
    hash: str


class Seam(NamedTuple):
    """The hash of a block up to an earlier certificate's end."""

    topic: str
    source: int
    lp: int
    first_seq: int
    hash: str


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain's blocks in order."""

    key: ChainKey
    records: int
    blocks: tuple[Block, ...]

    @property
    def first_seq(self) -> int:
        """Lowest seq."""
        return self.blocks[0].first_seq

    @property
    def last_seq(self) -> int:
        """Highest seq."""
        return max(block.last_seq for block in self.blocks)

    @property
    def hash(self) -> str:
        """Hash of all blocks."""
        told = "\n".join(f"{first}-{last}:{digest}" for first, last, digest in self.blocks)
        return sha256(told.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """Findings of the order audit."""

    inversions: int = 0
    gaps: int = 0
    duplicates: int = 0
    misplaced: int = 0

    @property
    def verdict(self) -> str:
        """The audit's word."""
        return "not clean" if any(asdict(self).values()) else "clean"


@dataclass(frozen=True, slots=True)
class Contents:
    """Chains, audit, and `seams` at an earlier certificate's ends."""

    chains: Sequence[Chain]
    audit: AuditCounts
    seams: Sequence[Seam] = ()

    @property
    def records(self) -> int:
        """All records."""
        return sum(chain.records for chain in self.chains)


@dataclass(frozen=True, slots=True)
class Continuation:
    """An earlier certificate, and the seams with it."""

    snapshot: str
    digest: str
    seams: tuple[Seam, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A snapshot's certificate; `facts`: of the snapshot."""

    facts: Mapping[str, Any]
    made_at: str
    version: str
    block_records: int
    audit: AuditCounts
    chains: tuple[Chain, ...]
    continues: Continuation | None = None
    signature: Mapping[str, str] | None = field(default=None, compare=False)

    @property
    def snapshot(self) -> str:
        """The snapshot's name."""
        return str(self.facts["name"])

    @property
    def records(self) -> int:
        """All records."""
        return sum(chain.records for chain in self.chains)

    def payload(self) -> bytes:
        """Return the signed bytes: JSON with sorted keys and without spaces."""
        return json.dumps(self._told(), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the signed bytes."""
        return sha256(self.payload()).hexdigest()

    def dump(self) -> str:
        """Return the file's text."""
        return json.dumps({"certificate": self._told(), "digest": self.digest, "signature": self.signature}) + "\n"

    def _told(self) -> dict[str, Any]:
        continues = self.continues
        return {
            "format": FORMAT,
            "made_at": self.made_at,
            "mqlayer": self.version,
            "snapshot": self.facts,
            "block_records": self.block_records,
            "audit": {"verdict": self.audit.verdict, **asdict(self.audit)},
            "chains": [
                {
                    **chain.key._asdict(),
                    "first_seq": chain.first_seq,
                    "last_seq": chain.last_seq,
                    "records": chain.records,
                    "hash": chain.hash,
                    "blocks": [list(block) for block in chain.blocks],
                }
                for chain in self.chains
            ],
            "continues": continues
            and {
                "snapshot": continues.snapshot,
                "digest": continues.digest,
                "seams": [list(seam) for seam in continues.seams],
            },
        }


class Difference(NamedTuple):
    """A difference; `kind`: missing, unexpected, block, facts, audit."""

    kind: str
    topic: str | None = None
    source: int | None = None
    lp: int | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    said: str = ""


ContinuationWord = Literal["proved", "unproven", "broken"]


class Continued(NamedTuple):
    """Whether a certificate continues an earlier one.

    `compared`: records that both hold, by equal hashes. `gone`: chains of which the later one holds none of the earlier
    one's records, as retention leaves them. `open`: ends of chains that need the later snapshot's data.
    """

    word: ContinuationWord
    compared: int
    gone: int
    open: int
    broken: Sequence[Difference]


def parse_certificate(text: str) -> tuple[Certificate, str]:
    """Return a file's certificate, and the digest that the file names. Raises InvalidInput."""
    try:
        whole = json.loads(text)
        told = whole["certificate"]
        if told["format"] != FORMAT:
            raise InvalidInput(
                f"the certificate has format {told['format']!r}, this mqlayer knows {FORMAT}: upgrade it"
            )
        counts = AuditCounts(**{name: int(told["audit"][name]) for name in COUNTS})
        continues = told["continues"]
        found = Certificate(
            told["snapshot"],
            told["made_at"],
            told["mqlayer"],
            int(told["block_records"]),
            counts,
            tuple(map(_chain, told["chains"])),
            continues
            and Continuation(
                continues["snapshot"], continues["digest"], tuple(Seam(*seam) for seam in continues["seams"])
            ),
            whole["signature"],
        )
        # What is printed beside the blocks must be what they give: else a reader would believe it.
        if found.payload() != json.dumps(told, sort_keys=True, separators=(",", ":")).encode():
            raise InvalidInput(f"the certificate contradicts itself: it was altered; {HINT}")
        return found, str(whole["digest"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise InvalidInput(f"the file holds no order certificate; {HINT}") from None


def _chain(told: Mapping[str, Any]) -> Chain:
    blocks = tuple(Block(int(first), int(last), str(digest)) for first, last, digest in told["blocks"])
    return Chain(ChainKey(told["topic"], int(told["source"]), int(told["lp"])), int(told["records"]), blocks)


def chains_of(blocks: Iterable[tuple[ChainKey, int, Block]]) -> list[Chain]:
    """Return the chains of (chain, records, block), in order."""
    ordered = sorted(blocks)
    found = []
    for key, rows in groupby(ordered, lambda row: row[0]):
        each = list(rows)
        found.append(Chain(key, sum(records for _, records, _ in each), tuple(block for *_, block in each)))
    return found


def differences(certificate: Certificate, contents: Contents, facts: Mapping[str, Any]) -> list[Difference]:
    """Return differences: of each chain the first differing block."""
    wanted = {chain.key: chain for chain in certificate.chains}
    there = {chain.key: chain for chain in contents.chains}
    each = (_chain_difference(wanted.get(key), there.get(key)) for key in sorted(wanted.keys() | there.keys()))
    found = [one for one in each if one is not None]
    if contents.audit != certificate.audit:
        said = f"the audit finds {_told(contents.audit)}, certified were {_told(certificate.audit)}"
        found.append(Difference("audit", said=said))
    found += [
        Difference("facts", said=f"{name} is {facts.get(name)!r}, certified was {value!r}")
        for name, value in certificate.facts.items()
        if facts.get(name) != value
    ]
    return found


def _told(audit: AuditCounts) -> str:
    return ", ".join(f"{count} {name}" for name, count in asdict(audit).items())


def _chain_difference(wanted: Chain | None, there: Chain | None) -> Difference | None:
    if wanted is None or there is None:
        chain = wanted or there
        assert chain is not None  # noqa: S101 - the key is of one of the two
        kind, said = ("missing", "the chain is not there") if there is None else ("unexpected", "not certified")
        return Difference(kind, *chain.key, chain.first_seq, chain.last_seq, said)
    for one, other in zip(wanted.blocks, there.blocks, strict=False):
        if one != other:
            same = one[:2] == other[:2]
            said = "its records are other ones" if same else f"there are seqs {other.first_seq} to {other.last_seq}"
            return Difference("block", *wanted.key, one.first_seq, one.last_seq, said)
    count = len(there.blocks)
    if len(wanted.blocks) > count:
        lost = wanted.blocks[count]
        return Difference("block", *wanted.key, lost.first_seq, lost.last_seq, "the block is not there")
    if len(wanted.blocks) < count:
        more = there.blocks[len(wanted.blocks)]
        return Difference("block", *wanted.key, more.first_seq, more.last_seq, "the block was not certified")
    if wanted.records != there.records:
        said = f"{there.records} records, certified were {wanted.records}"
        return Difference("block", *wanted.key, wanted.first_seq, wanted.last_seq, said)
    return None


def continued(later: Certificate, earlier: Certificate, seams: Sequence[Seam] | None = None) -> Continued:
    """Return whether a certificate continues an earlier one; `seams`: computed from the later snapshot's data.

    Without them, those in the certificate count where it was made to continue this very one. Each chain's common range
    is compared block by block. Retention drops whole days, and so whole blocks.
    """
    if later.block_records != earlier.block_records:
        said = f"blocks of {later.block_records} and {earlier.block_records} records can't be compared"
        return Continued("unproven", 0, 0, len(earlier.chains), [Difference("facts", said=said)])
    if seams is None:
        known = later.continues
        seams = known.seams if known is not None and known.digest == earlier.digest else ()
    joints = {(ChainKey(*seam[:3]), seam.first_seq): seam.hash for seam in seams}
    there = {chain.key: chain for chain in later.chains}
    compared = gone = left_open = 0
    broken: list[Difference] = []
    for chain in earlier.chains:
        found = _follow(chain, there.get(chain.key), joints)
        if isinstance(found, Difference):
            broken.append(found)
            continue
        compared += found.compared
        gone += found.gone
        left_open += found.open
    word: ContinuationWord = "broken" if broken else "proved" if compared and not left_open else "unproven"
    return Continued(word, compared, gone, left_open, broken)


class _Followed(NamedTuple):
    compared: int = 0
    gone: int = 0
    open: int = 0


def _follow(earlier: Chain, later: Chain | None, joints: Mapping[tuple[ChainKey, int], str]) -> _Followed | Difference:
    if later is None or later.first_seq > earlier.last_seq:
        return _Followed(gone=1)
    if later.last_seq < earlier.last_seq:
        said = f"it ends at seq {later.last_seq}, the earlier one at {earlier.last_seq}"
        return Difference("missing", *earlier.key, later.last_seq + 1, earlier.last_seq, said)
    if later.first_seq < earlier.first_seq:
        said = f"it begins at seq {later.first_seq}, the earlier one at {earlier.first_seq}"
        return Difference("unexpected", *earlier.key, later.first_seq, earlier.first_seq - 1, said)
    begun = {block.first_seq: block for block in later.blocks if block.first_seq <= earlier.last_seq}
    compared = left_open = 0
    for block in earlier.blocks:
        if block.last_seq < later.first_seq:
            continue
        found = begun.pop(block.first_seq, None)
        digest = None if found is None else found.hash
        if found is not None and found.last_seq > earlier.last_seq:
            digest = joints.get((earlier.key, block.first_seq))
            if digest is None:
                left_open = 1
                continue
        if digest != block.hash:
            said = "the block is not there" if found is None else "its records are other ones"
            return Difference("block", *earlier.key, block.first_seq, block.last_seq, said)
        compared += block.last_seq - block.first_seq + 1
    if begun:
        more = min(begun.values())
        return Difference("block", *earlier.key, more.first_seq, more.last_seq, "the earlier one has no such block")
    return _Followed(compared, 0, left_open)
