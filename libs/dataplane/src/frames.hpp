// What travels on a socket: a fixed header, then a body whose length it tells. Both ends check every number before they act on it.
//
// Little-endian. One request names all layers; its rows come back as one reply, cut into frames that follow each other, so that
// the first rows travel while later ones are gathered and a fault can still end the reply.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fault.hpp"
#include "versions.hpp"

namespace treadle::dataplane {

static_assert(std::endian::native == std::endian::little, "frames are little-endian, and so is every host that we know");

inline constexpr uint32_t FRAME_MAGIC = 0x4c445254;  // "TRDL"
inline constexpr uint16_t FRAME_PROTOCOL = 1;
inline constexpr uint32_t LAYERS_MAX = 64;              // of one request; the same limit as EngramModel's
inline constexpr uint64_t BODY_BYTES_MAX = 64u << 20;   // of a request: the windows of 2^20 tokens with room to spare
inline constexpr int64_t IDS_MAX = 1 << 22;             // row ids of one request: 32 MiB
inline constexpr int64_t TOKENS_MAX = 1 << 20;          // of one request; the same limit as Windows'
inline constexpr int64_t LOOKBACK_MAX = 15;             // the same limit as Windows'
inline constexpr uint64_t FAULT_TEXT_MAX = 256;
inline constexpr uint64_t PIECE_BYTES = 256u << 10;     // body of one frame of rows: half a second-level cache
inline constexpr int64_t RELATIVE_NS_MAX = int64_t{3600} * 1'000'000'000;  // no deadline is further away

// The numbers are wire-stable.
enum class Kind : uint16_t {
    gather = 1,     // body: LayerAsk x layer_count, then the ids of each layer, int64
    lookup = 2,     // body: LayerAsk x layer_count, WindowsHead, tokens, lookback, starts (padded to 8 bytes), dead, lookback_dead
    ping = 3,       // no body; answered by pong
    token_map = 4,  // body: one LayerAsk; answered by rows: int32 of the plan, empty where it has none
    rows = 16,      // body: bytes [offset, offset + body_bytes) of the reply
    fault = 17,     // body: a short text
    pong = 18,      // no body
};

struct FrameHeader {
    uint32_t magic = FRAME_MAGIC;
    uint16_t protocol = FRAME_PROTOCOL;
    uint16_t kind = 0;
    uint64_t request = 0;      // chosen by the caller, repeated in every frame of the reply
    uint64_t body_bytes = 0;   // behind this header
    int64_t deadline_ns = 0;   // request: from now on; negative: it has passed. fault: predicted finish from now on, 0: not known
    int64_t retry_ns = 0;      // fault: when to come again, from now on; 0: not known
    uint64_t offset = 0;       // rows: of this body in the reply
    uint64_t total_bytes = 0;  // rows: of the whole reply; the frame that reaches it is the last
    uint32_t layer_count = 0;  // request; fault: the Reason of a refusal
    int32_t fault = 0;         // fault
    Digest token{};            // request: sha256 of the caller's token; zeros: none
    Digest version{};          // request: which version; its manifest's sha256
    Digest fingerprint{};      // request: what the caller takes it for
};
static_assert(sizeof(FrameHeader) == 160 && std::is_trivially_copyable_v<FrameHeader>);

struct LayerAsk {
    int32_t layer = 0;
    uint32_t zero = 0;
    int64_t ids = 0;  // gather: how many; lookup: 0
};
static_assert(sizeof(LayerAsk) == 16);

struct WindowsHead {
    int64_t tokens = 0, requests = 0, columns = 0;
    uint32_t dead = 0, lookback_dead = 0;  // 1: the mask is there
};
static_assert(sizeof(WindowsHead) == 32);

inline constexpr uint64_t padded(uint64_t bytes) noexcept { return (bytes + 7) & ~uint64_t{7}; }

// A header that this end understands; what it says of lengths is checked by who reads on.
inline bool is_frame(const FrameHeader& header) noexcept {
    return header.magic == FRAME_MAGIC && header.protocol == FRAME_PROTOCOL;
}

inline FrameHeader fault_frame(uint64_t request, Fault fault, uint64_t text_bytes) noexcept {
    FrameHeader header;
    header.kind = static_cast<uint16_t>(Kind::fault);
    header.request = request;
    header.fault = static_cast<int32_t>(fault);
    header.body_bytes = text_bytes;
    return header;
}

// Equal, in a time that does not tell where they differ.
inline bool same_digest(const Digest& a, const Digest& b) noexcept {
    unsigned different = 0;
    for (size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned>(a[i] ^ b[i]);
    return different == 0;
}

}  // namespace treadle::dataplane
