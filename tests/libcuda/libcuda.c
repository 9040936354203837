// A libcuda.so.1 in host memory, built from the real prototypes, under the product's real ctypes calls.
//
// Every stream is a thread that does its work in order, some time after it was submitted. Streams know
// nothing of each other but events, and random delays keep them apart, so a missing wait shows as wrong
// bytes. "Device memory" is ordinary memory that cuMemAlloc returned or a test has declared.
//
// It is as strict as the documentation allows a driver to be. What no driver has to survive (a handle
// used after its end, memory unregistered while a copy needs it, a batch above the limit, a call without
// a context) is refused and noted; a test ends by asking for these notes (kvt_notes).

#define _GNU_SOURCE
#include <cuda.h>
#include <cudaTypedefs.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define RELAXED CU_STREAM_CAPTURE_MODE_RELAXED
#define PIECE 65536

// -- the kernel: the product's own source, compiled for the host --------------------------------

typedef struct { unsigned x, y, z, w; } uint4;
static struct { unsigned x; } gridDim, blockDim, blockIdx, threadIdx;
#define __global__ static
#include "copy_list.cu"
#undef __global__

// -- state ----------------------------------------------------------------------------------------

typedef struct stream stream_t;

typedef struct {
    CUdeviceptr to, from;
    size_t bytes;
} copy_t;

typedef enum { COPIES, WAIT, CALL, KERNEL } kind_t;

typedef struct operation {
    struct operation *next;
    kind_t kind;
    copy_t *copies;  // COPIES
    size_t count;
    void *staged;  // COPIES from pageable memory, read when submitted
    int is_batch;
    stream_t *other;  // WAIT
    uint64_t position;
    void (*call)(void);  // CALL
    CUdeviceptr list;    // KERNEL
    long long listed;
    unsigned grid, block;
} operation_t;

struct stream {
    int destroyed, held, stopping, running;
    uint64_t submitted, finished;
    operation_t *first, *last;
    pthread_t thread;
    uint64_t random;
};

typedef struct {
    int destroyed;
    stream_t *stream;  // NULL: never recorded
    uint64_t position;
} event_t;

typedef struct range {
    struct range *next;
    uint64_t start, bytes;
    int is_allocated;
} range_t;

typedef struct { char *text; } module_t;
typedef struct { int is_copy_list; } function_t;

#define NAMES 64
#define NOTES 64
#define STREAMS 256
#define EVENTS 65536

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static struct {
    struct { char name[48]; long long calls, fail, nth, nth_code; } functions[NAMES];
    struct { int thread; unsigned modes; } threads[1024];
    int function_count, thread_count;
    char *notes[NOTES];
    int note_count;
    stream_t *streams[STREAMS];  // [0] is the default stream
    int stream_count;
    event_t *events[EVENTS];
    int event_count;
    range_t *device, *registered;
    long long retained[2];
    int broken;  // a sticky error: every later call returns it
    long long clock_ns, largest_batch;
    unsigned attribute_flags;
    int is_stopping;
    // what a test may set
    long long seed, delay_us, batch_limit, has_batch, host_pointers, page, event_failure;
    long long batch_store_ns, batch_load_ns, kernel_store_ns, kernel_load_ns;
} cuda;

static __thread CUcontext contexts[16];
static __thread int depth;
static __thread int capture_mode;

static CUcontext context_of(CUdevice device) { return (CUcontext)(uintptr_t)(0xC0000 + device); }
static int ordinal_of(CUdevice device) { return device == 40 ? 0 : device == 41 ? 1 : -1; }

static void note(const char *format, ...)
{
    va_list arguments;
    if (cuda.note_count == NOTES) return;
    va_start(arguments, format);
    if (vasprintf(&cuda.notes[cuda.note_count], format, arguments) >= 0) cuda.note_count++;
    va_end(arguments);
}

static uint64_t draw(uint64_t *state)  // xorshift64*
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717ull;
}

static int function_number(const char *name)
{
    for (int i = 0; i < cuda.function_count; i++)
        if (!strcmp(cuda.functions[i].name, name)) return i;
    if (cuda.function_count == NAMES) abort();
    snprintf(cuda.functions[cuda.function_count].name, 48, "%s", name);
    return cuda.function_count++;
}

static void see_mode(void)
{
    int me = gettid(), i = 0;
    while (i < cuda.thread_count && cuda.threads[i].thread != me) i++;
    if (i == 1024) return;
    if (i == cuda.thread_count) cuda.threads[cuda.thread_count++].thread = me, cuda.threads[i].modes = 0;
    cuda.threads[i].modes |= 1u << capture_mode;
}

// What a test wants this call to return; 0 is "do it".
static CUresult planned_failure(int number)
{
    if (cuda.functions[number].nth && --cuda.functions[number].nth == 0)
        return (CUresult)cuda.functions[number].nth_code;
    return (CUresult)cuda.functions[number].fail;
}

// Every function begins here: the lock is held when this returns 0.
static CUresult begin(const char *name, int needs_context)
{
    CUresult code;
    pthread_mutex_lock(&lock);
    int number = function_number(name);
    cuda.functions[number].calls++;
    pthread_cond_broadcast(&changed);
    code = planned_failure(number);
    if (!code && cuda.broken && strcmp(name, "cuGetErrorString")) code = (CUresult)cuda.broken;
    if (!code && needs_context) {
        if (!depth || !contexts[depth - 1]) {
            note("%s without a current context", name);
            code = CUDA_ERROR_INVALID_CONTEXT;
        } else {
            see_mode();
        }
    }
    if (code) pthread_mutex_unlock(&lock);
    return code;
}

static CUresult end(CUresult code)
{
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return code;
}

#define BEGIN(needs_context)                                  \
    do {                                                      \
        CUresult begun = begin(__func__, needs_context);      \
        if (begun) return begun;                              \
    } while (0)

// -- memory ---------------------------------------------------------------------------------------

static range_t *range_with(range_t *ranges, uint64_t start, uint64_t bytes)
{
    for (range_t *range = ranges; range; range = range->next)
        if (range->start <= start && start + bytes <= range->start + range->bytes) return range;
    return NULL;
}

static int touches(range_t *ranges, uint64_t start, uint64_t bytes)
{
    for (range_t *range = ranges; range; range = range->next)
        if (start < range->start + range->bytes && range->start < start + bytes) return 1;
    return 0;
}

static void add_range(range_t **ranges, uint64_t start, uint64_t bytes, int is_allocated)
{
    range_t *range = malloc(sizeof *range);
    *range = (range_t){*ranges, start, bytes, is_allocated};
    *ranges = range;
}

static int remove_range(range_t **ranges, uint64_t start, range_t *removed)
{
    for (range_t **at = ranges; *at; at = &(*at)->next) {
        if ((*at)->start != start) continue;
        range_t *range = *at;
        *at = range->next;
        *removed = *range;
        free(range);
        return 1;
    }
    return 0;
}

// A copy between the GPU and registered memory, inside one range on each side.
static int is_between_device_and_registered(copy_t copy)
{
    return (range_with(cuda.device, copy.to, copy.bytes)
            && range_with(cuda.registered, copy.from, copy.bytes))
        || (range_with(cuda.registered, copy.to, copy.bytes)
            && range_with(cuda.device, copy.from, copy.bytes));
}

static void move(copy_t copy, const void *staged, const char *what)
{
    // Piece by piece and each under the lock, so that nothing is unregistered beneath a piece.
    for (size_t at = 0; at < copy.bytes; at += PIECE) {
        size_t bytes = copy.bytes - at < PIECE ? copy.bytes - at : PIECE;
        pthread_mutex_lock(&lock);
        copy_t piece = {copy.to + at, copy.from + at, bytes};
        if (staged) {
            if (range_with(cuda.device, piece.to, bytes))
                memcpy((void *)piece.to, (const char *)staged + at, bytes);
            else
                note("%s to device memory that is gone", what);
        } else if (is_between_device_and_registered(piece)) {
            memcpy((void *)piece.to, (const void *)piece.from, bytes);
        } else if (!strcmp(what, "a pageable copy")) {
            memcpy((void *)piece.to, (const void *)piece.from, bytes);
        } else {
            note("%s of memory that was unregistered or freed", what);
        }
        pthread_mutex_unlock(&lock);
    }
}

// -- streams --------------------------------------------------------------------------------------

static int is_held(stream_t *stream) { return stream->held && !stream->stopping; }

static void run_copies(stream_t *stream, operation_t *operation)
{
    for (size_t i = operation->count; i > 1 && operation->is_batch; i--) {
        size_t other = draw(&stream->random) % i;
        copy_t held = operation->copies[i - 1];
        operation->copies[i - 1] = operation->copies[other];
        operation->copies[other] = held;
    }
    const char *what = operation->is_batch == 1 ? "a batched copy"
        : operation->is_batch == 2              ? "a pageable copy"
                                                : "a copy";
    for (size_t i = 0; i < operation->count; i++) move(operation->copies[i], operation->staged, what);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < operation->count; i++)
        if (operation->is_batch == 1)
            cuda.clock_ns += range_with(cuda.device, operation->copies[i].from, 1)
                ? cuda.batch_store_ns
                : cuda.batch_load_ns;
    pthread_mutex_unlock(&lock);
}

static void run_kernel(operation_t *operation)
{
    pthread_mutex_lock(&lock);
    long long count = operation->listed, *list = (long long *)operation->list;
    int is_wrong = count && !range_with(cuda.device, operation->list, 24 * count);
    if (is_wrong) note("the kernel's list is not on the device");
    for (long long i = 0; i < count && !is_wrong; i++) {
        copy_t copy = {list[i], list[count + i], list[2 * count + i]};
        if ((copy.to | copy.from | copy.bytes) % 16) {
            note("the kernel was given a copy that is not aligned to 16 bytes");
            is_wrong = 1;
        } else if (!is_between_device_and_registered(copy)) {
            note("the kernel was given memory that is not registered, or not the device's");
            is_wrong = 1;
        } else {
            cuda.clock_ns += range_with(cuda.device, copy.from, 1) ? cuda.kernel_store_ns
                                                                   : cuda.kernel_load_ns;
        }
    }
    gridDim.x = operation->grid;
    blockDim.x = operation->block;
    for (unsigned b = 0; b < operation->grid && !is_wrong; b++)
        for (unsigned t = 0; t < operation->block; t++) {
            blockIdx.x = operation->grid - 1 - b;
            threadIdx.x = t;
            kvtiers_copy_list(list, count);
        }
    pthread_mutex_unlock(&lock);
}

static void run_operation(stream_t *stream, operation_t *operation)
{
    uint64_t drawn = draw(&stream->random);
    if (cuda.delay_us && operation->kind != WAIT && drawn % 3 == 0)
        usleep((drawn >> 8) % cuda.delay_us);
    switch (operation->kind) {
    case COPIES: run_copies(stream, operation); break;
    case KERNEL: run_kernel(operation); break;
    case CALL: operation->call(); break;
    case WAIT: break;
    }
}

static int waits_for_another(operation_t *operation)
{
    return operation->kind == WAIT && operation->other->finished < operation->position;
}

static void *work(void *argument)
{
    stream_t *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        operation_t *operation = stream->first;
        if (!operation || is_held(stream)) {
            if (!operation && stream->stopping) break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (waits_for_another(operation) && !cuda.is_stopping) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (!cuda.is_stopping) {
            stream->running = 1;
            pthread_mutex_unlock(&lock);
            run_operation(stream, operation);
            pthread_mutex_lock(&lock);
            stream->running = 0;
        }
        stream->first = operation->next;
        if (!stream->first) stream->last = NULL;
        free(operation->copies);
        free(operation->staged);
        free(operation);
        stream->finished++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static stream_t *new_stream(void)
{
    if (cuda.stream_count == STREAMS) return NULL;
    stream_t *stream = calloc(1, sizeof *stream);
    stream->random = 0x9E3779B97F4A7C15ull * (uint64_t)(cuda.seed * STREAMS + cuda.stream_count + 1);
    cuda.streams[cuda.stream_count++] = stream;
    pthread_create(&stream->thread, NULL, work, stream);
    return stream;
}

static stream_t *stream_of(CUstream handle, const char *name)
{
    if (!handle) return cuda.streams[0];
    for (int i = 1; i < cuda.stream_count; i++)
        if (cuda.streams[i] == (stream_t *)handle && !cuda.streams[i]->destroyed) return cuda.streams[i];
    note("%s: a stream after its end", name);
    return NULL;
}

static event_t *event_of(CUevent handle, const char *name)
{
    for (int i = 0; i < cuda.event_count; i++)
        if (cuda.events[i] == (event_t *)handle && !cuda.events[i]->destroyed) return cuda.events[i];
    note("%s: an event after its end", name);
    return NULL;
}

static operation_t *submit(stream_t *stream, kind_t kind)
{
    operation_t *operation = calloc(1, sizeof *operation);
    operation->kind = kind;
    if (stream->last) stream->last->next = operation;
    else stream->first = operation;
    stream->last = operation;
    stream->submitted++;
    return operation;
}

static void submit_copies(stream_t *stream, copy_t *copies, size_t count, int is_batch, void *staged)
{
    operation_t *operation = submit(stream, COPIES);
    operation->copies = malloc(count * sizeof *copies);
    memcpy(operation->copies, copies, count * sizeof *copies);
    operation->count = count;
    operation->is_batch = is_batch;
    operation->staged = staged;
}

static void await(stream_t *stream, uint64_t position)
{
    while (stream->finished < position && !cuda.is_stopping) pthread_cond_wait(&changed, &lock);
}

// -- the driver's functions ------------------------------------------------------------------------

EXPORT CUresult CUDAAPI cuInit(unsigned int Flags)
{
    BEGIN(0);
    return end(Flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
    BEGIN(0);
    *driverVersion = CUDA_VERSION;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
    BEGIN(0);
    if (ordinal < 0 || ordinal > 1) return end(CUDA_ERROR_INVALID_DEVICE);
    *device = 40 + ordinal;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    BEGIN(0);
    if (ordinal_of(dev) < 0) return end(CUDA_ERROR_INVALID_DEVICE);
    if (attrib != CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
        note("an attribute that nobody should ask for: %d", attrib);
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    *pi = (int)cuda.host_pointers;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)
{
    BEGIN(0);
    if (ordinal_of(dev) < 0 || len < 13) return end(CUDA_ERROR_INVALID_VALUE);
    strcpy(pciBusId, ordinal_of(dev) ? "0000:A3:00.0" : "0000:65:00.0");
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    BEGIN(0);
    if (ordinal_of(dev) < 0) return end(CUDA_ERROR_INVALID_DEVICE);
    cuda.retained[ordinal_of(dev)]++;
    *pctx = context_of(dev);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev)
{
    BEGIN(0);
    if (ordinal_of(dev) < 0) return end(CUDA_ERROR_INVALID_DEVICE);
    if (--cuda.retained[ordinal_of(dev)] < 0) note("a context released more often than retained");
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *pctx)
{
    BEGIN(0);
    *pctx = depth ? contexts[depth - 1] : NULL;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx)
{
    BEGIN(0);
    if (!depth) depth = 1;
    contexts[depth - 1] = ctx;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx)
{
    BEGIN(0);
    if (depth == 16) return end(CUDA_ERROR_INVALID_CONTEXT);
    contexts[depth++] = ctx;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx)
{
    BEGIN(0);
    if (!depth) {
        note("a context popped that was not pushed");
        return end(CUDA_ERROR_INVALID_CONTEXT);
    }
    *pctx = contexts[--depth];
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    BEGIN(0);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize)
{
    BEGIN(1);
    void *memory = mmap(NULL, bytesize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!bytesize || memory == MAP_FAILED) return end(CUDA_ERROR_OUT_OF_MEMORY);
    memset(memory, 0xA5, bytesize);
    add_range(&cuda.device, (uint64_t)memory, bytesize, 1);
    *dptr = (CUdeviceptr)memory;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemFree(CUdeviceptr dptr)
{
    range_t range;
    BEGIN(1);
    if (!remove_range(&cuda.device, dptr, &range) || !range.is_allocated) {
        note("device memory freed that was not allocated");
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    munmap((void *)range.start, range.bytes);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
    uint64_t start = (uint64_t)p;
    BEGIN(1);
    if (capture_mode != RELAXED) note("pinning that would break a graph being captured");
    if (Flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)) note("pinning without flags");
    if (!bytesize || start % cuda.page || bytesize % cuda.page) {
        note("pinning of %zu bytes at %p, which are not whole pages", bytesize, p);
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    if (touches(cuda.registered, start, bytesize)) return end(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    add_range(&cuda.registered, start, bytesize, 0);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    range_t range;
    BEGIN(1);
    if (!remove_range(&cuda.registered, (uint64_t)p, &range)) return end(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
    BEGIN(1);
    stream_t *stream = stream_of(hStream, __func__);
    copy_t copy = {dst, src, ByteCount};
    int to_device = range_with(cuda.device, dst, ByteCount) != NULL;
    uint64_t host = to_device ? src : dst;
    if (!stream) return end(CUDA_ERROR_INVALID_HANDLE);
    if (to_device == (range_with(cuda.device, src, ByteCount) != NULL)) {
        note("a copy that is not between the host and the device");
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    if (range_with(cuda.registered, host, ByteCount)) {
        submit_copies(stream, &copy, 1, 0, NULL);
    } else if (touches(cuda.registered, host, ByteCount)) {
        return end(CUDA_ERROR_INVALID_VALUE);
    } else if (to_device) {  // pageable: read now, whatever the stream waits for
        void *staged = malloc(ByteCount);
        memcpy(staged, (void *)src, ByteCount);
        submit_copies(stream, &copy, 1, 0, staged);
    } else {  // to pageable memory: returns when it has run
        submit_copies(stream, &copy, 1, 2, NULL);
        uint64_t position = stream->submitted;
        pthread_cond_broadcast(&changed);
        await(stream, position);
    }
    return end(CUDA_SUCCESS);
}

static CUresult batch_copy(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                           CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs,
                           size_t *failIdx, CUstream hStream)
{
    // A planned failure strikes half-way: the copies before it are on the stream.
    pthread_mutex_lock(&lock);
    CUresult planned = planned_failure(function_number("half of cuMemcpyBatchAsync"));
    pthread_mutex_unlock(&lock);
    CUresult begun = begin("cuMemcpyBatchAsync", 1);
    if (begun) return begun;
    stream_t *stream = stream_of(hStream, "cuMemcpyBatchAsync");
    if (!stream) return end(CUDA_ERROR_INVALID_HANDLE);
    if (!hStream || !count || numAttrs != 1 || attrsIdxs[0] != 0) return end(CUDA_ERROR_INVALID_VALUE);
    if (attrs->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) note("a batch that reads out of order");
    cuda.attribute_flags = attrs->flags;
    if ((long long)count > cuda.largest_batch) cuda.largest_batch = count;
    if ((long long)count > cuda.batch_limit) {
        note("a batch of %zu copies: above %lld drivers crash or hang", count, cuda.batch_limit);
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    if (!cuda.host_pointers) {
        cuda.broken = CUDA_ERROR_ILLEGAL_ADDRESS;
        return end(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    size_t stop = planned ? count / 2 : count;
    copy_t *copies = malloc((count + 1) * sizeof *copies);
    for (size_t i = 0; i < count; i++) copies[i] = (copy_t){dsts[i], srcs[i], sizes[i]};
    for (size_t i = 0; i < stop; i++)
        if (!sizes[i] || !is_between_device_and_registered(copies[i])) {
            *failIdx = i;
            stop = i;
            planned = CUDA_ERROR_INVALID_VALUE;
        }
    if (stop) submit_copies(stream, copies, stop, 1, NULL);
    free(copies);
    if (planned) *failIdx = stop;
    return end(planned);
}

EXPORT CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                         cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)
{
    PFN_cuMemcpyBatchAsync_v12080 function = batch_copy;
    BEGIN(0);
    if (strcmp(symbol, "cuMemcpyBatchAsync") || cudaVersion != 12080 || flags) {
        note("cuGetProcAddress of %s, version %d", symbol, cudaVersion);
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    *pfn = cuda.has_batch ? (void *)function : NULL;
    *symbolStatus = cuda.has_batch ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    BEGIN(1);
    *leastPriority = 0;
    *greatestPriority = -5;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
    BEGIN(1);
    if (flags != CU_STREAM_NON_BLOCKING || priority) note("a stream with flags %u, priority %d", flags, priority);
    *phStream = (CUstream)new_stream();
    return end(*phStream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream hStream)
{
    BEGIN(1);
    stream_t *stream = stream_of(hStream, __func__);
    if (!stream || stream == cuda.streams[0]) return end(CUDA_ERROR_INVALID_HANDLE);
    if (stream->first) note("a stream destroyed with work on it");
    stream->destroyed = stream->stopping = 1;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream hStream)
{
    BEGIN(1);
    stream_t *stream = stream_of(hStream, __func__);
    if (!stream) return end(CUDA_ERROR_INVALID_HANDLE);
    await(stream, stream->submitted);
    return end((CUresult)cuda.event_failure);
}

EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    BEGIN(1);
    stream_t *stream = stream_of(hStream, __func__);
    event_t *event = event_of(hEvent, __func__);
    if (!stream || !event) return end(CUDA_ERROR_INVALID_HANDLE);
    if (Flags) return end(CUDA_ERROR_INVALID_VALUE);
    if (!event->stream) {
        note("a wait for an event that was never recorded");
        return end(CUDA_SUCCESS);
    }
    operation_t *operation = submit(stream, WAIT);
    operation->other = event->stream;
    operation->position = event->position;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    BEGIN(1);
    if (Flags != (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) note("an event with flags %u", Flags);
    if (cuda.event_count == EVENTS) return end(CUDA_ERROR_OUT_OF_MEMORY);
    event_t *event = calloc(1, sizeof *event);
    cuda.events[cuda.event_count++] = event;
    *phEvent = (CUevent)event;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventRecord(CUevent hEvent, CUstream hStream)
{
    BEGIN(1);
    stream_t *stream = stream_of(hStream, __func__);
    event_t *event = event_of(hEvent, __func__);
    if (!stream || !event) return end(CUDA_ERROR_INVALID_HANDLE);
    event->stream = stream;
    event->position = stream->submitted;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent hEvent)
{
    BEGIN(1);
    event_t *event = event_of(hEvent, __func__);
    if (!event) return end(CUDA_ERROR_INVALID_HANDLE);
    if (!event->stream) note("an event synchronized before it was recorded");
    else await(event->stream, event->position);
    return end((CUresult)cuda.event_failure);
}

EXPORT CUresult CUDAAPI cuEventDestroy(CUevent hEvent)
{
    BEGIN(1);
    event_t *event = event_of(hEvent, __func__);
    if (!event) return end(CUDA_ERROR_INVALID_HANDLE);
    event->destroyed = 1;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr)
{
    BEGIN(0);
    *pStr = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument"
        : error == CUDA_ERROR_OUT_OF_MEMORY   ? "out of memory"
                                              : NULL;
    return end(*pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
    BEGIN(1);
    if (!strstr(image, ".entry")) return end(CUDA_ERROR_INVALID_IMAGE);
    module_t *loaded = malloc(sizeof *loaded);
    loaded->text = strdup(image);
    *module = (CUmodule)loaded;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod)
{
    BEGIN(1);
    free(((module_t *)hmod)->text);
    free(hmod);
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
    static function_t copy_list = {1};
    char entry[128];
    BEGIN(1);
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr(((module_t *)hmod)->text, entry)) return end(CUDA_ERROR_NOT_FOUND);
    *hfunc = (CUfunction)&copy_list;
    return end(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                       unsigned int gridDimZ, unsigned int blockDimX,
                                       unsigned int blockDimY, unsigned int blockDimZ,
                                       unsigned int sharedMemBytes, CUstream hStream,
                                       void **kernelParams, void **extra)
{
    BEGIN(1);
    stream_t *stream = stream_of(hStream, __func__);
    if (!stream) return end(CUDA_ERROR_INVALID_HANDLE);
    if (!((function_t *)f)->is_copy_list || gridDimY != 1 || gridDimZ != 1 || blockDimY != 1
        || blockDimZ != 1 || sharedMemBytes || extra || !gridDimX || blockDimX % 32 || blockDimX > 1024)
        return end(CUDA_ERROR_INVALID_VALUE);
    if (!cuda.host_pointers) {
        cuda.broken = CUDA_ERROR_ILLEGAL_ADDRESS;
        return end(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    operation_t *operation = submit(stream, KERNEL);
    operation->list = *(CUdeviceptr *)kernelParams[0];
    operation->listed = *(long long *)kernelParams[1];
    operation->grid = gridDimX;
    operation->block = blockDimX;
    return end(CUDA_SUCCESS);
}

// -- for tests -------------------------------------------------------------------------------------

static void forget_everything(void)
{
    for (int i = 0; i < cuda.stream_count; i++) free(cuda.streams[i]);
    for (int i = 0; i < cuda.event_count; i++) free(cuda.events[i]);
    for (int i = 0; i < cuda.note_count; i++) free(cuda.notes[i]);
    for (range_t **lists[] = {&cuda.device, &cuda.registered}, **each = *lists;;) {
        while (*each) {
            range_t *next = (*each)->next;
            if ((*each)->is_allocated) munmap((void *)(*each)->start, (*each)->bytes);
            free(*each);
            *each = next;
        }
        if (each == &cuda.registered) break;
        each = &cuda.registered;
    }
    memset(&cuda, 0, sizeof cuda);
}

EXPORT void kvt_reset(long long seed)
{
    pthread_mutex_lock(&lock);
    cuda.is_stopping = 1;
    for (int i = 0; i < cuda.stream_count; i++) cuda.streams[i]->stopping = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < cuda.stream_count; i++) pthread_join(cuda.streams[i]->thread, NULL);
    pthread_mutex_lock(&lock);
    forget_everything();
    depth = 0;
    capture_mode = 0;
    cuda.seed = seed;
    cuda.delay_us = 200;
    cuda.batch_limit = 1024;
    cuda.has_batch = cuda.host_pointers = 1;
    cuda.page = 4096;
    new_stream();
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void load(void) { kvt_reset(0); }

EXPORT void kvt_set(const char *name, long long value)
{
    struct { const char *name; long long *value; } options[] = {
        {"delay_us", &cuda.delay_us}, {"batch_limit", &cuda.batch_limit}, {"has_batch", &cuda.has_batch},
        {"host_pointers", &cuda.host_pointers}, {"page", &cuda.page}, {"event_failure", &cuda.event_failure},
        {"batch_store_ns", &cuda.batch_store_ns}, {"batch_load_ns", &cuda.batch_load_ns},
        {"kernel_store_ns", &cuda.kernel_store_ns}, {"kernel_load_ns", &cuda.kernel_load_ns},
    };
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (!strcmp(options[i].name, name)) {
            *options[i].value = value;
            end(CUDA_SUCCESS);
            return;
        }
    abort();
}

EXPORT void kvt_fail(const char *name, long long code, long long nth)
{
    pthread_mutex_lock(&lock);
    int number = function_number(name);
    if (nth) cuda.functions[number].nth = nth, cuda.functions[number].nth_code = code;
    else cuda.functions[number].fail = code;
    pthread_mutex_unlock(&lock);
}

EXPORT void kvt_make_current(CUdevice device)
{
    depth = 1;
    contexts[0] = context_of(device);
}

EXPORT long long kvt_current(void) { return depth ? (long long)contexts[depth - 1] : 0; }
EXPORT int kvt_depth(void) { return depth; }
EXPORT int kvt_capture_mode(void) { return capture_mode; }

EXPORT void kvt_on_device(uint64_t start, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    add_range(&cuda.device, start, bytes, 0);
    pthread_mutex_unlock(&lock);
}

EXPORT void kvt_hold(CUstream handle, int is_held, int all)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < cuda.stream_count; i++)
        if (all || cuda.streams[i] == (handle ? (stream_t *)handle : cuda.streams[0]))
            cuda.streams[i]->held = is_held;
    end(CUDA_SUCCESS);
}

EXPORT void kvt_launch(void (*call)(void), CUstream handle)
{
    pthread_mutex_lock(&lock);
    stream_t *stream = stream_of(handle, __func__);
    if (stream) submit(stream, CALL)->call = call;
    end(CUDA_SUCCESS);
}

// A stream of the model, which is none of ours.
EXPORT CUstream kvt_model_stream(void)
{
    pthread_mutex_lock(&lock);
    CUstream stream = (CUstream)new_stream();
    pthread_mutex_unlock(&lock);
    return stream;
}

EXPORT long long kvt_calls(const char *name)
{
    pthread_mutex_lock(&lock);
    long long calls = cuda.functions[function_number(name)].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

static void deadline_in(struct timespec *deadline, double seconds)
{
    clock_gettime(CLOCK_REALTIME, deadline);
    deadline->tv_sec += (time_t)seconds;
}

EXPORT int kvt_await_call(const char *name, long long times, double seconds)
{
    struct timespec deadline;
    deadline_in(&deadline, seconds);
    pthread_mutex_lock(&lock);
    int number = function_number(name), code = 0;
    while (cuda.functions[number].calls < times && !code)
        code = pthread_cond_timedwait(&changed, &lock, &deadline);
    pthread_mutex_unlock(&lock);
    return code == 0;
}

// Waits until every stream has run everything.
EXPORT int kvt_await_idle(double seconds)
{
    struct timespec deadline;
    deadline_in(&deadline, seconds);
    pthread_mutex_lock(&lock);
    int code = 0, i = 0;
    while (i < cuda.stream_count && !code) {
        if (cuda.streams[i]->first) code = pthread_cond_timedwait(&changed, &lock, &deadline), i = 0;
        else i++;
    }
    pthread_mutex_unlock(&lock);
    return code == 0;
}

// Waits until no stream can go on: each has run everything, is held, or waits for another.
EXPORT int kvt_await_stuck(double seconds)
{
    struct timespec deadline;
    deadline_in(&deadline, seconds);
    pthread_mutex_lock(&lock);
    int code = 0, i = 0;
    while (i < cuda.stream_count && !code) {
        stream_t *stream = cuda.streams[i];
        int can_go_on = stream->first && !is_held(stream) && !waits_for_another(stream->first);
        if (stream->running || can_go_on) code = pthread_cond_timedwait(&changed, &lock, &deadline), i = 0;
        else i++;
    }
    pthread_mutex_unlock(&lock);
    return code == 0;
}

EXPORT long long kvt_count(const char *what)
{
    long long count = -1;
    pthread_mutex_lock(&lock);
    if (!strcmp(what, "streams")) {
        count = 0;
        for (int i = 1; i < cuda.stream_count; i++) count += !cuda.streams[i]->destroyed;
    } else if (!strcmp(what, "events")) {
        count = 0;
        for (int i = 0; i < cuda.event_count; i++) count += !cuda.events[i]->destroyed;
    } else if (!strcmp(what, "registered")) {
        count = 0;
        for (range_t *range = cuda.registered; range; range = range->next) count++;
    } else if (!strcmp(what, "allocated")) {
        count = 0;
        for (range_t *range = cuda.device; range; range = range->next) count += range->is_allocated;
    } else if (!strcmp(what, "retained")) {
        count = cuda.retained[0] + cuda.retained[1];
    } else if (!strcmp(what, "queued")) {
        count = 0;
        for (int i = 0; i < cuda.stream_count; i++) count += cuda.streams[i]->first != NULL;
    } else if (!strcmp(what, "largest_batch")) {
        count = cuda.largest_batch;
    } else if (!strcmp(what, "clock_ns")) {
        count = cuda.clock_ns;
    } else if (!strcmp(what, "attribute_flags")) {
        count = cuda.attribute_flags;
    } else if (!strcmp(what, "notes")) {
        count = cuda.note_count;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT const char *kvt_note(int number) { return cuda.notes[number]; }

// The range number `at`, newest first; 0 where there is none.
EXPORT int kvt_registered(int at, uint64_t *start, uint64_t *bytes)
{
    pthread_mutex_lock(&lock);
    range_t *range = cuda.registered;
    while (range && at--) range = range->next;
    if (range) *start = range->start, *bytes = range->bytes;
    pthread_mutex_unlock(&lock);
    return range != NULL;
}

EXPORT unsigned kvt_modes(int thread)
{
    unsigned modes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < cuda.thread_count; i++)
        if (cuda.threads[i].thread == thread) modes = cuda.threads[i].modes;
    pthread_mutex_unlock(&lock);
    return modes;
}
