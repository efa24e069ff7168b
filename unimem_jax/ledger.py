"""Who still uses each unit, and until when.

What it is: the state of every unit of every sub-pool, one table of legal transitions and one
function that applies it; tickets in dispatch order; pins of users that device order does not
protect from. What it does not do: it chooses no address and knows no ids.

    beyond --grow--> hole --grant--> live --vacate--> vacated --retire--> beyond
    hole --trim--> beyond           live --free--> hole             vacated --grow--> hole
    live --free_pinned--> pending --unpin--> hole
    live --fence--> fenced --unpin--> live          fenced --free_pinned--> pending

* hole: free inside its band. beyond: outside the band; other bands may cover its bytes.
* pending: freed, but a host copy or a peer still uses the bytes. vacated: moved away by a batch
  whose step has not retired. fenced: a peer may write it; no device program may use it.
* Device programs run in dispatch order on the arena, so a unit freed without a pin is a hole at
  once.

Invariants (checked by `check`):
  L1  every unit is in a state of the table, and pending and fenced units have a pin;
  L2  pins lie on live, pending and fenced units only;
  L3  0 <= retired <= dispatched, and no unit is stamped later than the last dispatched ticket,
      other than those that moves and copies still to be dispatched name.
"""

from collections import deque
from collections.abc import Hashable
from typing import NoReturn

import numpy as np

from unimem_jax.bands import Geometry
from unimem_jax.errors import InvariantError, UsageError, plain_int

BEYOND, HOLE, LIVE, PENDING, VACATED, FENCED = range(6)
STATES = ("beyond", "hole", "live", "pending", "vacated", "fenced")
GROW, TRIM, GRANT, FREE, FREE_PINNED, VACATE, RETIRE, PIN, UNPIN, FENCE, COPY = range(11)
EVENTS = (
    "grow",
    "trim",
    "grant",
    "free",
    "free_pinned",
    "vacate",
    "retire",
    "pin",
    "unpin",
    "fence",
    "copy",
)
CALLER_EVENTS = frozenset(
    {FREE, FREE_PINNED, PIN, UNPIN, FENCE, COPY}
)  # a wrong one is the caller's fault, not ours
REFUSED = 255
MOST_UNWRITTEN = 64  # stamps of many units that wait to be written
MOST_VACATED = 4096  # addresses remembered before those that are used again are forgotten
NEVER = np.iinfo(np.int64).max  # stamp of a unit that a queued program uses

TRANSITIONS = {
    (BEYOND, GROW): HOLE,
    (VACATED, GROW): HOLE,
    (HOLE, TRIM): BEYOND,
    (HOLE, GRANT): LIVE,
    (LIVE, FREE): HOLE,
    (LIVE, FREE_PINNED): PENDING,
    (FENCED, FREE_PINNED): PENDING,
    (LIVE, VACATE): VACATED,
    (VACATED, RETIRE): BEYOND,
    (LIVE, PIN): LIVE,
    (LIVE, UNPIN): LIVE,
    (PENDING, UNPIN): HOLE,
    (FENCED, UNPIN): LIVE,
    (LIVE, FENCE): FENCED,
    (LIVE, COPY): LIVE,
}
# The table as bytes, so that `bytes.translate` follows an event's arrows for many units at once.
_ROWS = tuple(
    bytes(TRANSITIONS.get((state, event), REFUSED) for state in range(256))
    for event in range(len(EVENTS))
)

Addresses = int | slice | np.ndarray


class Ledger:
    """States, tickets and pins of all units. Its methods change nothing when they raise.

    Attributes:
      states: uint8[unit_count] per sub-pool.
      pins: per sub-pool {address: [user, ...]}, a user once per pin.
      dispatched, retired: the last ticket given out and the last one retired; tickets start at 1.
    """

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self.states = [np.full(count, BEYOND, np.uint8) for count in geometry.unit_counts]
        self.pins: list[dict[int, list[Hashable]]] = [{} for _ in geometry.ends]
        self.dispatched = 0
        self.retired = 0
        self._views = [memoryview(state) for state in self.states]
        self._stamps = [np.zeros(count, np.int64) for count in geometry.unit_counts]
        self._stamp_views = [memoryview(stamp) for stamp in self._stamps]
        self._unwritten: list[tuple[int, int, np.ndarray]] = []  # stamps by ticket and sub-pool
        self._is_queued = False  # whether moves or copies wait that have no ticket
        self._handed_out = 0  # the ticket of the last ones that have, dispatched or not
        self._vacated: deque[tuple[int, int, np.ndarray]] = deque()  # by ticket
        self._vacated_count = 0  # addresses in it
        self._most_vacated = MOST_VACATED

    def apply(self, sub_pool: int, addresses: Addresses, event: int) -> None:
        """Takes every named unit along its arrow of the table, or none if one has no such arrow.

        Args:
          addresses: one address, a slice of addresses or an integer array without repeats.
        Raises:
          UsageError: a caller's event meets a unit that it cannot happen to. InvariantError: ours
            does.
        Cost: one table look-up per unit.
        """
        if isinstance(addresses, int):
            view = self._views[sub_pool]
            following = _ROWS[event][view[addresses]]
            if following == REFUSED:
                self._refuse(sub_pool, addresses, event)
            view[addresses] = following
            return
        self._enter(sub_pool, addresses, self._reached(sub_pool, addresses, event))

    def _enter(self, sub_pool: int, addresses: slice | np.ndarray, reached: bytes) -> None:
        is_uniform = reached == reached[:1] * len(reached)  # nearly always, and half the cost
        following = reached[0] if is_uniform and reached else np.frombuffer(reached, np.uint8)
        self.states[sub_pool][addresses] = following

    def _reached(self, sub_pool: int, addresses: slice | np.ndarray, event: int) -> bytes:
        """The states that units would be in after an event. Raises as `apply`."""
        states = self.states[sub_pool]
        reached = states[addresses].tobytes().translate(_ROWS[event])
        if REFUSED in reached:
            refused = np.arange(len(states))[addresses][reached.index(REFUSED)]
            self._refuse(sub_pool, int(refused), event)
        return reached

    def _refuse(self, sub_pool: int, address: int, event: int) -> NoReturn:
        blame = UsageError if event in CALLER_EVENTS else InvariantError
        state = STATES[self.states[sub_pool][address]]
        raise blame(f"cannot {EVENTS[event]} unit {address} of sub-pool {sub_pool}: it is {state}")

    def free(self, sub_pool: int, addresses: np.ndarray) -> np.ndarray:
        """Frees live units and stamps them with the last dispatched ticket, unless they have the
        later stamp of a move that is still to be dispatched.

        Returns:
          Those that became holes at once; the others are pending under a pin.
        """
        pins = self.pins[sub_pool]
        if pins:
            is_held = np.fromiter((address in pins for address in addresses.tolist()), bool)
            held, addresses = addresses[is_held], addresses[~is_held]
            self._reached(sub_pool, addresses, FREE)  # or raises before the others change
            self.apply(sub_pool, held, FREE_PINNED)
            self._stamp(sub_pool, held)
        self.apply(sub_pool, addresses, FREE)
        self._stamp(sub_pool, addresses)
        return addresses

    def _stamp(self, sub_pool: int, addresses: np.ndarray) -> None:
        """Notes that every program dispatched so far may use these units.

        A stamp counts until its ticket retires, so most are never written.
        """
        self._unwritten.append((self.dispatched, sub_pool, addresses))
        if len(self._unwritten) > MOST_UNWRITTEN:
            self._write_stamps()

    def _write_stamps(self) -> None:
        """Writes the stamps of freed units that count; none is lowered."""
        for ticket, sub_pool, addresses in self._unwritten:
            if ticket > self.retired:
                stamps = self._stamps[sub_pool]
                stamps[addresses] = np.maximum(stamps[addresses], ticket)
        self._unwritten.clear()

    def free_one(self, sub_pool: int, address: int) -> bool:
        """`free` for one unit. Returns whether it became a hole."""
        pins = self.pins[sub_pool]
        is_held = bool(pins) and address in pins
        self.apply(sub_pool, address, FREE_PINNED if is_held else FREE)
        stamps = self._stamp_views[sub_pool]
        if stamps[address] < self.dispatched:
            stamps[address] = self.dispatched
        return not is_held

    def move(self, sub_pool: int, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Takes live units to holes: the sources are vacated, the destinations live, and both are
        queued.
        """
        if not len(sources):
            return
        granted = self._reached(sub_pool, destinations, GRANT)  # or raises before a source changes
        self.apply(sub_pool, sources, VACATE)
        self._enter(sub_pool, destinations, granted)
        self.queue(sub_pool, sources, destinations)

    def queue(self, sub_pool: int, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Notes that a program without a ticket yet will copy between these units."""
        self._is_queued = True
        self._stamps[sub_pool][sources] = NEVER
        self._stamps[sub_pool][destinations] = NEVER

    def hand_out(self, sub_pool: int, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Notes that these queued copies are the next program, after those handed out before.

        All that is queued is handed out at once, in order.
        """
        self._is_queued = False
        self._handed_out = max(self._handed_out, self.dispatched) + 1
        self._stamps[sub_pool][sources] = self._handed_out
        self._stamps[sub_pool][destinations] = self._handed_out
        self._vacated.append((self._handed_out, sub_pool, sources))
        self._vacated_count += len(sources)
        if self._vacated_count > self._most_vacated:
            self._forget_reused()

    def _forget_reused(self) -> None:
        """Forgets what was vacated and has been used again or is yet to be vacated again, of
        programs that have not retired: no more than all units are vacated at once.
        """
        kept = [
            (ticket, sub_pool, addresses[self._is_vacated(ticket, sub_pool, addresses)])
            for ticket, sub_pool, addresses in self._vacated
        ]
        self._vacated = deque(entry for entry in kept if len(entry[2]))
        self._vacated_count = sum(len(addresses) for _, _, addresses in self._vacated)
        self._most_vacated = max(MOST_VACATED, 2 * self._vacated_count)

    def _is_vacated(self, ticket: int, sub_pool: int, addresses: np.ndarray) -> np.ndarray:
        """Which units are vacated, and have been since the program of this ticket."""
        is_vacated: np.ndarray = self.states[sub_pool][addresses] == VACATED
        return is_vacated & (self._stamps[sub_pool][addresses] == ticket)

    def dispatch(self) -> int:
        """Numbers the device program that was just dispatched."""
        self.dispatched += 1
        return self.dispatched

    def retire(self, ticket: int) -> None:
        """Records that a program has finished on all shards. Tickets retire in order, one by one.

        Raises:
          UsageError: the ticket is not the next one, or was never given out.
        """
        ticket = plain_int(ticket, "tickets count from 1")
        if ticket != self.retired + 1 or ticket > self.dispatched:
            raise UsageError(
                f"ticket {ticket} cannot retire: tickets retire one by one, {self.retired} was "
                f"the last and {self.dispatched} is the last dispatched"
            )
        self.retired = ticket
        while self._vacated and self._vacated[0][0] <= ticket:
            last, sub_pool, addresses = self._vacated.popleft()
            self._vacated_count -= len(addresses)
            is_vacated = self._is_vacated(last, sub_pool, addresses)
            self.apply(sub_pool, addresses[is_vacated], RETIRE)

    def settled(self, sub_pool: int, address: int) -> bool:
        """Whether every program that used the bytes of a unit before its present owner has retired.

        The bytes may have belonged to units of other sub-pools, so all units that overlap them are
        asked.
        """
        self._known(sub_pool, address)
        self._write_stamps()
        unit = self.geometry.unit_granules[sub_pool]
        begin, end = address * unit, (address + 1) * unit
        for other, stamps in zip(self.geometry.unit_granules, self._stamps, strict=True):
            overlap = stamps[begin // other : -(-end // other)]
            if overlap.size and overlap.max() > self.retired:
                return False
        return True

    def pin(self, sub_pool: int, address: int, user: Hashable) -> None:
        """Keeps a live unit where it is, and its bytes unused after it is freed, until the same
        user unpins it.

        Raises:
          UsageError: the unit is not live, or no such address.
        """
        self._known(sub_pool, address)
        self.apply(sub_pool, address, PIN)
        self.pins[sub_pool].setdefault(address, []).append(user)

    def fence(self, sub_pool: int, address: int, peer: Hashable) -> None:
        """Gives a live unit to a peer that will write it; after this its address may be published.

        Raises:
          UsageError: the unit is not live, has other users, or a program that used its bytes has
            not retired.
        """
        self._known(sub_pool, address)
        if address in self.pins[sub_pool]:
            raise UsageError(
                f"unit {address} of sub-pool {sub_pool} is pinned; a fenced unit has one user only"
            )
        if not self.settled(sub_pool, address):
            raise UsageError(
                f"unit {address} of sub-pool {sub_pool} was used after ticket {self.retired}; "
                "retire the later ones first"
            )
        self.apply(sub_pool, address, FENCE)
        self.pins[sub_pool][address] = [peer]

    def unpin(self, sub_pool: int, address: int, user: Hashable) -> bool:
        """Ends one pin or fence of a user.

        Returns:
          True if the unit was pending and is a hole now.
        Raises:
          UsageError: the user holds no pin there.
        """
        self._known(sub_pool, address)
        users = self.pins[sub_pool].get(address, [])
        if user not in users:
            raise UsageError(f"{user!r} holds no pin on unit {address} of sub-pool {sub_pool}")
        users.remove(user)
        if users:
            return False
        del self.pins[sub_pool][address]
        was_pending = self._views[sub_pool][address] == PENDING
        self.apply(sub_pool, address, UNPIN)
        return was_pending

    def pending_count(self, sub_pool: int) -> int:
        """Units that wait for a pin. Cost: O(pins)."""
        view = self._views[sub_pool]
        return sum(view[address] == PENDING for address in self.pins[sub_pool])

    def _known(self, sub_pool: int, address: int) -> None:
        rule = "a unit is an address from 0 on in a sub-pool from 0 on"
        pool, at = plain_int(sub_pool, rule, 0), plain_int(address, rule, 0)
        if pool >= len(self.states) or at >= len(self.states[pool]):
            raise UsageError(f"no unit {address} in sub-pool {sub_pool}; addresses start at 0")

    def check(self) -> None:
        """Verifies L1 to L3 from scratch. Raises InvariantError naming the first that fails. Cost:
        O(units).
        """
        self._write_stamps()
        for index, (states, stamps) in enumerate(zip(self.states, self._stamps, strict=True)):
            protected = set(np.flatnonzero((states == PENDING) | (states == FENCED)).tolist())
            if states.size and states.max() >= len(STATES):
                raise InvariantError(f"L1: sub-pool {index} has a unit in no known state")
            if not protected <= self.pins[index].keys():
                raise InvariantError(
                    f"L1: sub-pool {index} has pending or fenced units without a pin"
                )
            allowed = protected | {a for a in self.pins[index] if states[a] == LIVE}
            if self.pins[index].keys() - allowed or not all(self.pins[index].values()):
                raise InvariantError(f"L2: sub-pool {index} has pins on units that nobody holds")
            given = stamps[stamps < NEVER] if self._is_queued else stamps
            if given.size and given.max() > max(self.dispatched, self._handed_out):
                raise InvariantError(f"L3: sub-pool {index} has a unit stamped after every program")
        if not 0 <= self.retired <= self.dispatched:
            raise InvariantError(
                f"L3: ticket {self.retired} retired, but only {self.dispatched} dispatched"
            )


def trimmed_end(view: memoryview, lo: int, hi: int) -> int:
    """The end of states [lo, hi) without trailing holes. Cost: O(holes dropped)."""
    window = 64
    while hi > lo:
        start = max(lo, hi - window)
        kept = bytes(view[start:hi]).rstrip(bytes([HOLE]))
        if kept:
            return start + len(kept)
        hi, window = start, window * 8
    return lo


def trimmed_start(view: memoryview, lo: int, hi: int) -> int:
    """The start of states [lo, hi) without leading holes. Cost: O(holes dropped)."""
    window = 64
    while lo < hi:
        stop = min(hi, lo + window)
        kept = bytes(view[lo:stop]).lstrip(bytes([HOLE]))
        if kept:
            return stop - len(kept)
        lo, window = stop, window * 8
    return hi
