// Why a piece, a ticket or a request did not give its rows. The numbers stand in frames and rings: never change one, only add.
#pragma once

#include <cstdint>

namespace treadle::dataplane {

enum class Fault : int32_t {
    none = 0,
    data_loss = 1,      // the bytes are not what they should be: a truncated file, a bad checksum
    unavailable = 2,    // swap, restart, connection lost: try again, or elsewhere
    not_found = 3,      // no such version or layer here
    out_of_range = 4,   // a row id outside the table, or rows that this owner does not hold
    invalid = 5,        // shape, size or field
    refused = 6,        // queue, quota or admission: the predicted finish is beyond the deadline, or there is no room
    late = 7,           // the deadline passed before the rows were there
    forbidden = 8,      // token
    mismatch = 9,       // version or fingerprint
    internal = 10,      // our bug
};

}  // namespace treadle::dataplane
